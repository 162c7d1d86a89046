// A small part of Markdown as DOM nodes: fences, headings, lists, quotes, and within a line code, bold, italic and
// links. All other text is shown unchanged; nothing is ever parsed as HTML.

import { copyButton, make } from "./dom.js";

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

/** The blocks of a text: [{kind, source, level?, language?}]. */
export function split(text) {
  const blocks = [];
  let fence = null;
  for (const line of text.split("\n")) {
    const last = blocks.at(-1);
    const mark = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/.exec(line);
    if (fence) {
      if (mark && mark[1].startsWith(fence) && !mark[2]) fence = null;
      else last.source += (last.source && "\n") + line;
      if (!fence) blocks.push({ kind: "gap", source: "" });
      continue;
    }
    if (mark) {
      fence = mark[1];
      blocks.push({ kind: "code", source: "", language: mark[2] });
      continue;
    }
    const { kind, level, content } = classify(line);
    if (last?.kind === kind && kind !== "heading") last.source += "\n" + content;
    else if (last?.kind === "list" && kind === "text" && /^\s+/.test(line)) last.source += "\n" + line;
    else blocks.push({ kind, source: content, level });
  }
  return blocks.filter((block) => block.kind !== "gap");
}

function classify(line) {
  let match;
  if (/^\s*$/.test(line)) return { kind: "gap", content: "" };
  if ((match = /^(#{1,6})\s+(.*?)\s*#*$/.exec(line))) return { kind: "heading", level: match[1].length, content: match[2] };
  if (/^\s*([-*+•]|\d{1,9}[.)])\s+/.test(line)) return { kind: "list", content: line };
  if ((match = /^>\s?(.*)$/.exec(line))) return { kind: "quote", content: match[1] };
  return { kind: "text", content: line };
}

function render({ kind, source, level, language }) {
  if (kind === "code") {
    const bar = make("div", { className: "bar" }, make("span", {}, language || "text"), copyButton(() => source, "Copy code"));
    return make("div", { className: "code" }, bar, make("pre", { tabIndex: 0 }, make("code", {}, source)));
  }
  if (kind === "heading") return make(`h${Math.min(level + 2, 6)}`, {}, ...inline(source));
  if (kind === "quote") return make("blockquote", {}, ...inline(source));
  if (kind === "list") return list(source.split("\n"));
  return make("p", {}, ...inline(source));
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

const SPANS = /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)\*\*|(?<![\w*])\*(?=\S)([^*\n]+?)\*(?![\w*])|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/s;

/** The nodes of one run of text. */
export function inline(text) {
  const nodes = [];
  for (let match; (match = SPANS.exec(text)); ) {
    if (match.index) nodes.push(text.slice(0, match.index));
    const [whole, , code, bold, italic, label, href] = match;
    if (code !== undefined) nodes.push(make("code", {}, code));
    else if (bold !== undefined) nodes.push(make("strong", {}, ...inline(bold)));
    else if (italic !== undefined) nodes.push(make("em", {}, ...inline(italic)));
    else nodes.push(make("a", { href, target: "_blank", rel: "noopener noreferrer" }, label));
    text = text.slice(match.index + whole.length);
  }
  if (text) nodes.push(text);
  return nodes;
}
