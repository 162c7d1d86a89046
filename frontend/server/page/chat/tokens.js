// The tokens of an answer: how probable each was, what else could have come, and which were proposed by a draft.

import { make, textButton } from "../dom.js";

const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  return value >= 99.95 ? "100%" : value < 0.1 ? "<0.1%" : `${value.toFixed(1)}%`;
};
const MOST = 10_000; // tokens that are shown
const LEVELS = [0.9, 0.5, 0.2, 0.05]; // lower ends of the levels of colour
const level = (logprob) => {
  const at = LEVELS.findIndex((end) => Math.exp(logprob) >= end);
  return at < 0 ? LEVELS.length : at;
};
const visible = (text) => text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t") || "∅";

/** The view of a message's tokens. record(): generates the answer again, with what is needed. */
export function tokenView({ tokens }, record = () => {}) {
  const view = make("section", { className: "tokens", ariaLabel: "Tokens of the answer" });
  if (!tokens?.length) {
    view.append(make("p", {}, "This answer was generated without probabilities."), textButton("Generate it again with them", record));
    return view;
  }
  const detail = make("div", { className: "detail", ariaLive: "polite" }, make("p", { className: "note" }, "Point at a token, or move with the arrow keys."));
  const list = make("div", { className: "text-tokens", role: "group", ariaLabel: "Tokens" }, tokens.slice(0, MOST).map((token, i) => one(token, i)));
  const select = (target) => {
    if (!target?.matches?.(".token")) return;
    list.querySelector(".chosen")?.classList.remove("chosen");
    target.classList.add("chosen");
    detail.replaceChildren(...told(tokens[target.dataset.at], Number(target.dataset.at)));
  };
  list.addEventListener("pointerover", ({ target }) => select(target));
  list.addEventListener("focusin", ({ target }) => select(target));
  list.addEventListener("keydown", (event) => move(event, list));
  view.append(legend(tokens), list, detail);
  return view;
}

function one([text, logprob, , draft], at) {
  const className = `token p${level(logprob)}${draft ? " draft" : draft === null ? " maybe" : ""}`;
  const label = `${text.trim() || visible(text)}, ${percent(logprob)}${draft ? ", draft" : ""}`;
  const node = make("button", { type: "button", className, tabIndex: at ? -1 : 0, ariaLabel: label }, visible(text));
  node.dataset.at = at;
  return node;
}

function move(event, list) {
  const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
  if (!step) return;
  event.preventDefault();
  const at = Number(document.activeElement.dataset.at);
  const next = list.children[Math.min(Math.max(at + step, 0), list.children.length - 1)];
  document.activeElement.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function told([text, logprob, alternatives, draft], at) {
  const listed = alternatives.some(([other]) => other === text) ? alternatives : [[text, logprob], ...alternatives];
  const rows = listed.map(([other, value]) => {
    const bar = make("i");
    bar.style.width = `${100 * Math.exp(value)}%`;
    const cells = [make("td", {}, make("code", {}, visible(other))), make("td", { className: "share", ariaHidden: "true" }, bar), make("td", {}, percent(value))];
    return make("tr", { className: other === text ? "taken" : "" }, ...cells);
  });
  const from = { true: "A draft proposed it, and the model agreed.", null: "It came with others, some of which were drafts." }[draft] ?? "";
  return [make("p", {}, make("strong", {}, `Token ${at + 1}: `), make("code", {}, visible(text)), ` ${percent(logprob)}. ${from}`), make("table", {}, make("tbody", {}, ...rows))];
}

function legend(tokens) {
  const levels = ["90% or more", "50%", "20%", "5%", "less"].map((text, i) => make("span", { className: `token p${i}` }, text));
  const drafts = tokens.filter(([, , , draft]) => draft).length;
  const surprise = -tokens.reduce((sum, [, logprob]) => sum + logprob, 0) / tokens.length;
  const count = tokens.length > MOST ? `the first ${MOST.toLocaleString("en")} of ${tokens.length.toLocaleString("en")} tokens` : `${tokens.length} tokens`;
  const parts = [count, `perplexity ${Math.exp(surprise).toFixed(2)}`];
  if (drafts) parts.push(`${drafts} were drafts (underlined)`);
  return make("div", { className: "legend" }, make("span", {}, parts.join(" · ")), make("span", { className: "levels" }, "Probability: ", ...levels));
}
