// The elements of Markdown: from the tokens of parser.js, one by one, with text as text. Nothing is ever parsed as HTML.

import { copyButton, make } from "../dom.js";
import { coloured } from "./code.js";
import { formula } from "./formula.js";
import { tooDeep } from "./parser.js";

const DEEPEST = 20; // elements within each other in a line: browsers lay out thousands slowly, or not at all
const TASK = /^\[([ xX])\] /;
const DIRECTIONS = /[\u202a-\u202e\u2066-\u2069]/; // with which a text can look like another

/** The element of one block: its tokens, and the text that they come from. */
export function block(found, source) {
  if (tooDeep(found)) return plain(source);
  const root = document.createDocumentFragment();
  const open = [root];
  for (const token of found) {
    if (token.nesting < 0) open.pop();
    else if (token.type === "inline") line(open.at(-1), token.children);
    else {
      const [node, inner] = element(token);
      if (node) open.at(-1).append(node);
      if (token.nesting > 0) open.push(inner ?? node ?? open.at(-1));
    }
  }
  return root.firstChild ?? plain(source);
}

/** Text as it is. */
export const plain = (text) => make("p", { className: "plain-text" }, text.trimEnd());

const PLAIN = new Set("blockquote ul li thead tbody tr hr".split(" "));

/** The element of a block's token, and where its content goes, if that is another. */
function element(token) {
  const { type, tag, content, hidden } = token;
  if (type === "fence" || type === "code_block") return [codeBlock(content.replace(/\n$/, ""), language(token.info))];
  if (type === "formula_block") return [make("div", { className: "formula", tabIndex: 0, role: "group", ariaLabel: "Formula" }, formula(content, true))];
  if (tag === "p") return [hidden ? null : make("p")];
  if (tag === "ol") return [make("ol", { start: Number(token.attrGet("start") ?? 1) })];
  if (tag === "th" || tag === "td") return [make(tag, { className: side(token) })];
  if (tag === "table") {
    const table = make("table");
    return [make("div", { className: "wide-table", tabIndex: 0, role: "group", ariaLabel: "Table" }, table), table];
  }
  if (/^h[1-6]$/.test(tag)) return [make(`h${Math.min(Number(tag[1]) + 2, 6)}`)];
  if (PLAIN.has(tag)) return [make(tag)];
  throw new TypeError(`no element for ${type}`);
}

const language = (info) => /^\s*([\w+#.-]{1,40})/.exec(info)?.[1] ?? "";
const side = (token) => ({ "text-align:right": "right", "text-align:center": "middle" })[token.attrGet("style")] ?? "left";

/** Append the elements of a line's tokens. */
function line(parent, found) {
  const open = [parent];
  const task = beginsItem(parent) && TASK.exec(found[0]?.content ?? "");
  if (task) parent.append(box(task[1] !== " "));
  found.forEach((token, i) => {
    const at = open.at(-1);
    if (token.nesting < 0) open.pop();
    else if (token.nesting === 0) at.append(leaf(token, i === 0 && task ? task[0].length : 0, at));
    else if (open.length > DEEPEST) open.push(at);
    else {
      const node = span(token);
      at.append(node);
      open.push(node);
    }
  });
}

/** True for an empty list item, and for the empty paragraph that is its first element. */
const beginsItem = (node) => !node.firstChild && (node.localName === "li" || (node.parentNode?.localName === "li" && node.parentNode.firstChild === node));

/** The mark of a task in a list. */
const box = (done) => make("span", { className: "task", role: "img", ariaLabel: done ? "Done" : "To do" }, done ? "☑" : "☐");

function span(token) {
  if (token.type === "link_open") return link(token.attrGet("href"));
  if (["strong", "em", "s"].includes(token.tag)) return make(token.tag === "s" ? "del" : token.tag);
  throw new TypeError(`no element for ${token.type}`);
}

function leaf(token, from, parent) {
  if (token.type === "code_inline") return make("code", {}, token.content);
  if (token.type === "formula") return formula(token.content);
  if (token.type === "softbreak" || token.type === "hardbreak") return make("br");
  if (token.type !== "image") return token.content.slice(from);
  // A picture of another server would tell it who reads this: only its address is shown.
  const address = token.attrGet("src");
  const text = token.children.map(({ content }) => content).join("") || address;
  return parent.closest?.("a") ? text : link(address, text);
}

const link = (href, ...children) => make("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...children);

/** Code in colours, with its language and a button that copies it. */
export function codeBlock(source, name = "") {
  const told = DIRECTIONS.test(source) ? `${name || "text"} · has marks that turn the direction of text` : name || "text";
  const bar = make("div", { className: "bar" }, make("span", {}, told), copyButton(() => source, "Copy code"));
  const label = name ? `Code, ${name}` : "Code";
  return make("div", { className: "code" }, bar, make("pre", { tabIndex: 0, role: "group", ariaLabel: label }, make("code", {}, coloured(source, name))));
}
