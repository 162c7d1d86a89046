// Markdown as tokens, by markdown-it (vendor/), and formulas, which it does not know. Nothing here makes HTML.
//
// Of CommonMark, three things differ. HTML is text. A line of dashes under a text is a rule, as models mean it. Definitions
// of links ("[1]: https://...") are text: one at the end would change what was shown long before.

import MarkdownIt from "../vendor/markdown-it.esm.min.mjs";

export const DEEPEST = 40; // levels of quotes and lists; what lies deeper is left out by markdown-it (see blocks.js)
const LONGEST = 2000; // characters of a formula in a line: the end of one that is never closed is not looked for further

const parser = new MarkdownIt({ html: false, linkify: false, typographer: false, maxNesting: DEEPEST });
parser.disable(["lheading", "reference"]);
parser.validateLink = (address) => /^https?:\/\//i.test(address);
parser.block.ruler.before("fence", "formula", displayed, { alt: ["paragraph", "blockquote", "list", "table"] });
parser.inline.ruler.before("escape", "formula", spanned);

/** The tokens of a text, as https://markdown-it.github.io/markdown-it/ has them, and `formula` and `formula_block`. */
export const tokens = (text) => parser.parse(text, {});

/** True if markdown-it left out something within these tokens, because it lies too deep. */
export const tooDeep = (found) => found.some(({ level, nesting }) => nesting === 1 && level >= DEEPEST - 1);

const CLOSING = { "$$": "$$", "\\[": "\\]", "\\(": "\\)" };

/** A formula of its own lines: from "$$" or "\[" at the beginning of a line to its closing at the end of one. */
function displayed(state, first, last, silent) {
  const line = (at) => state.src.slice(state.bMarks[at] + state.tShift[at], state.eMarks[at]).trimEnd();
  const opening = line(first).slice(0, 2);
  if ((opening !== "$$" && opening !== "\\[") || state.sCount[first] - state.blkIndent >= 4) return false;
  if (silent) return true;
  const closing = CLOSING[opening];
  const lines = [line(first).slice(2)];
  let at = first + 1;
  for (; !lines.at(-1).endsWith(closing) && at < last && !outdented(state, at); at += 1) lines.push(line(at));
  const token = state.push("formula_block", "", 0);
  token.content = lines.join("\n");
  if (token.content.endsWith(closing)) token.content = token.content.slice(0, -closing.length);
  token.map = [first, at];
  state.line = at;
  return true;
}

const outdented = (state, at) => state.sCount[at] < state.blkIndent && !state.isEmpty(at);

/** A formula within a line: \(...\), \[...\] or $...$. */
function spanned(state, silent) {
  const text = state.src.slice(state.pos, Math.min(state.posMax, state.pos + LONGEST));
  const opening = text.slice(0, 2);
  let found = null; // [formula, all of it]
  if (opening === "\\(" || opening === "\\[") {
    const end = text.indexOf(CLOSING[opening], 2);
    if (end > 2) found = [text.slice(2, end), end + 2];
  } else if (text[0] === "$" && !/[\w$\\]/.test(state.src[state.pos - 1] ?? "")) {
    // Not "5 $ and 6 $", nor "$5 and $6".
    const [all, inner] = /^\$([^\s$](?:[^$\n]*[^\s$\\])?)\$(?![\w$])/.exec(text) ?? [];
    if (all) found = [inner, all.length];
  }
  if (!found) return false;
  if (!silent) state.push("formula", "", 0).content = found[0];
  state.pos += found[1];
  return true;
}
