// Markdown as DOM nodes: fences, headings, lists, quotes, tables, rules and formulas; within a line see inline.js.
// All other text is shown unchanged; nothing is ever parsed as HTML.

import { copyButton, make } from "../dom.js";
import { coloured } from "./code.js";
import { formula } from "./formula.js";
import { inline } from "./inline.js";

/** Show `text` in `parent`. Blocks that have not changed since the last call keep their nodes. */
export function show(parent, text) {
  const blocks = split(text);
  blocks.forEach((block, i) => {
    const old = parent.children[i];
    if (old?.source === block.source && old?.kind === block.kind) return;
    const node = render(block);
    [node.source, node.kind] = [block.source, block.kind];
    if (old) old.replaceWith(node);
    else parent.append(node);
  });
  while (parent.children.length > blocks.length) parent.lastChild.remove();
}

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/;
const DELIMITERS = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const CLOSING = { "$$": "$$", "\\[": "\\]" };

/** The blocks of a text: [{kind, source, level?, language?}]. */
export function split(text) {
  const blocks = [];
  const lines = text.split("\n");
  for (let at = 0; at < lines.length; at += 1) {
    const [line, last] = [lines[at], blocks.at(-1)];
    const fence = FENCE.exec(line);
    const opening = /^\s*(\$\$|\\\[)/.exec(line)?.[1];
    let block;
    if (fence) [block, at] = fenced(lines, at, fence);
    else if (opening) [block, at] = displayed(lines, at, opening);
    else if (line.includes("|") && DELIMITERS.test(lines[at + 1] ?? "") && lines[at + 1].includes("|")) [block, at] = tabled(lines, at);
    else {
      const { kind, level, content } = classify(line);
      if (last?.kind === kind && ["text", "quote", "list", "gap"].includes(kind)) last.source += "\n" + content;
      else if (last?.kind === "list" && kind === "text" && /^\s+/.test(line)) last.source += "\n" + line;
      else blocks.push({ kind, source: content, level });
      continue;
    }
    blocks.push(block, { kind: "gap", source: "" });
  }
  return blocks.filter((block) => block.kind !== "gap");
}

/** The block of a fence that opens at a line, and its last line. */
function fenced(lines, at, [, mark, language]) {
  const source = [];
  for (at += 1; at < lines.length; at += 1) {
    const end = FENCE.exec(lines[at]);
    if (end && end[1].startsWith(mark) && !end[2]) break;
    source.push(lines[at]);
  }
  return [{ kind: "code", source: source.join("\n"), language }, at];
}

/** The block of a formula that opens at a line, and its last line. */
function displayed(lines, at, opening) {
  const source = [lines[at].trim().slice(2)];
  while (!source.at(-1).trimEnd().endsWith(CLOSING[opening]) && at + 1 < lines.length) source.push(lines[(at += 1)]);
  return [{ kind: "formula", source: source.join("\n").trimEnd().replace(/(\$\$|\\\])$/, "") }, at];
}

function tabled(lines, at) {
  const source = [];
  for (; at < lines.length && lines[at].includes("|"); at += 1) source.push(lines[at]);
  return [{ kind: "table", source: source.join("\n") }, at - 1];
}

function classify(line) {
  let match;
  if (/^\s*$/.test(line)) return { kind: "gap", content: "" };
  if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) return { kind: "rule", content: "" };
  if ((match = /^(#{1,6})\s+(.*?)\s*#*$/.exec(line))) return { kind: "heading", level: match[1].length, content: match[2] };
  if (/^\s*([-*+•]|\d{1,9}[.)])\s+/.test(line)) return { kind: "list", content: line };
  if ((match = /^>\s?(.*)$/.exec(line))) return { kind: "quote", content: match[1] };
  return { kind: "text", content: line };
}

function render({ kind, source, level, language }) {
  if (kind === "code") return codeBlock(source, language);
  if (kind === "formula") return make("div", { className: "formula", tabIndex: 0, role: "group", ariaLabel: "Formula" }, formula(source, true));
  if (kind === "heading") return make(`h${Math.min(level + 2, 6)}`, {}, ...inline(source));
  if (kind === "quote") return make("blockquote", {}, ...split(source).map(render));
  if (kind === "list") return list(source.split("\n"));
  if (kind === "table") return table(source.split("\n"));
  if (kind === "rule") return make("hr");
  return make("p", {}, ...inline(source));
}

/** Code in colours, with its language and a button that copies it. */
export function codeBlock(source, language) {
  const bar = make("div", { className: "bar" }, make("span", {}, language || "text"), copyButton(() => source, "Copy code"));
  const label = language ? `Code, ${language}` : "Code";
  return make("div", { className: "code" }, bar, make("pre", { tabIndex: 0, role: "group", ariaLabel: label }, make("code", {}, ...coloured(source, language))));
}

/** Nested lists, by indentation. */
function list(lines) {
  const root = make("div", { className: "list" });
  const open = [{ indent: -1, node: root }];
  for (const line of lines) {
    const match = /^(\s*)([-*+•]|(\d+)[.)])\s+(.*)$/.exec(line);
    if (!match) {
      open.at(-1).item.append("\n", ...inline(line.trim()));
      continue;
    }
    const indent = match[1].length;
    while (open.at(-1).indent > indent) open.pop();
    if (open.at(-1).indent < indent) {
      const node = match[3] ? make("ol", { start: Number(match[3]) }) : make("ul");
      (open.at(-1).item ?? root).append(node);
      open.push({ indent, node });
    }
    const item = make("li", {}, ...inline(match[4]));
    open.at(-1).node.append(item);
    open.at(-1).item = item;
  }
  return root;
}

/** The cells of a row, without the bars at its ends; a bar after a backslash is text. */
const cells = (line) =>
  line
    .trim()
    .replace(/^\||(?<!\\)\|$/g, "")
    .split(/(?<!\\)\|/)
    .map((cell) => cell.trim().replaceAll("\\|", "|"));

function table([head, delimiters, ...rows]) {
  const sides = cells(delimiters).map((cell) => (/^-+:$/.test(cell) ? "right" : /^:-+:$/.test(cell) ? "middle" : "left"));
  const row = (tag, line) => {
    const texts = cells(line);
    return make("tr", {}, ...sides.map((className, i) => make(tag, { className }, ...inline(texts[i] ?? ""))));
  };
  const made = make("table", {}, make("thead", {}, row("th", head)), make("tbody", {}, ...rows.map((line) => row("td", line))));
  return make("div", { className: "wide-table", tabIndex: 0, role: "group", ariaLabel: "Table" }, made);
}
