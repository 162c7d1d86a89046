// A text of Markdown that may still grow, as elements. What has come to its end is neither parsed nor made again.

import { block, plain } from "./blocks.js";
import { tokens } from "./parser.js";

const MOST = 500_000; // characters that are parsed at once; more than that is shown as it is
const shown = new WeakMap(); // by parent, {text, at, before, count}: where the last block begins, and the elements before it

/** Show `text` in `parent`. Blocks that have not changed since the last call keep their elements. Never throws. */
export function show(parent, text) {
  text = text.replace(/\r\n?/g, "\n");
  let state = shown.get(parent);
  if (!state || state.count !== parent.childElementCount || !text.startsWith(state.text)) state = { at: 0, before: 0 };
  const blocks = split(text.slice(state.at));
  blocks.forEach(({ source, found }, i) => {
    const old = parent.children[state.before + i];
    if (old?.source === source) return;
    const node = made(found, source);
    node.source = source;
    if (old) old.replaceWith(node);
    else parent.append(node);
  });
  while (parent.children.length > state.before + blocks.length) parent.lastChild.remove();
  const last = blocks.findLastIndex(({ ended }) => ended);
  const at = last < 0 ? state.at : state.at + blocks[last].at;
  shown.set(parent, { text, at, before: state.before + Math.max(last, 0), count: parent.childElementCount });
}

function made(found, source) {
  try {
    return found ? block(found, source) : plain(source);
  } catch (error) {
    console.warn("A part of a text is shown as it is:", error);
    return plain(source);
  }
}

/** The blocks of a text: [{at, source, found, ended}]. found: tokens, null: to be shown as it is. ended: its first line is
 * whole, so that nothing before it can change; "1" may become "1.", and belong to the list before it. */
function split(text) {
  const all = text.length > MOST ? null : parsed(text);
  if (!all) return [{ at: 0, source: text, found: null, ended: false }];
  const blocks = [];
  let [begin, line, at] = [0, 0, 0];
  const offset = (wanted) => {
    for (; line < wanted; line += 1) at = text.indexOf("\n", at) + 1 || text.length;
    return at;
  };
  all.forEach((token, i) => {
    if (token.level !== 0 || token.nesting > 0) return;
    const [from, to] = all[begin].map;
    const start = offset(from);
    const ended = text.indexOf("\n", start) >= 0;
    blocks.push({ at: start, source: text.slice(start, offset(to)), found: all.slice(begin, i + 1), ended });
    begin = i + 1;
  });
  return blocks;
}

function parsed(text) {
  try {
    return tokens(text);
  } catch (error) {
    console.warn("A text is shown as it is:", error);
    return null;
  }
}
