// Markdown within a line: code, bold, italic, struck text, links and formulas.

import { make } from "../dom.js";
import { formula } from "./formula.js";

const SPANS = new RegExp(
  [
    /(?<tick>`+)(?<code>.+?)\k<tick>(?!`)/,
    /\\\((?<round>.+?)\\\)/,
    /(?<![\w$\\])\$(?<dollar>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?![\w$])/, // not "5 $ and 6 $", nor "$5 and $6"
    /\*\*(?=\S)(?<bold>.+?)\*\*/,
    /(?<![\w*])\*(?=\S)(?<italic>[^*\n]+?)\*(?![\w*])/,
    /~~(?=\S)(?<struck>.+?)~~/,
    /\[(?<label>[^\]\n]+)\]\((?<href>https?:\/\/[^\s)]+)\)/,
  ]
    .map(({ source }) => source)
    .join("|"),
  "s",
);

/** The nodes of one run of text. */
export function inline(text) {
  const nodes = [];
  for (let match; (match = SPANS.exec(text)); ) {
    if (match.index) nodes.push(text.slice(0, match.index));
    nodes.push(span(match.groups));
    text = text.slice(match.index + match[0].length);
  }
  if (text) nodes.push(text);
  return nodes;
}

function span({ code, round, dollar, bold, italic, struck, label, href }) {
  if (code !== undefined) return make("code", {}, code);
  if (round !== undefined) return formula(round);
  if (dollar !== undefined) return formula(dollar);
  if (bold !== undefined) return make("strong", {}, ...inline(bold));
  if (italic !== undefined) return make("em", {}, ...inline(italic));
  if (struck !== undefined) return make("del", {}, ...inline(struck));
  return make("a", { href, target: "_blank", rel: "noopener noreferrer" }, label);
}
