// Creation of elements. Text is inserted as text, never as HTML.

export const TOUCH = matchMedia("(pointer: coarse)");

export const $ = (id) => document.getElementById(id);

/** An element: make("a", { href }, "text", child). Functions become listeners: { onclick: f }. A child may be an array: many
 * children are given so, since a call has room for some ten thousand arguments. */
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  for (const child of children.flat()) node.append(child);
  return node;
}

/** An SVG element with these attributes. */
export function draw(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** One of the icons of index.html. */
export const icon = (name) => draw("svg", { "aria-hidden": "true" }, draw("use", { href: `#icon-${name}` }));

/** A button with an icon only. */
export function button(name, label, onclick) {
  return make("button", { type: "button", className: "quiet", title: label, ariaLabel: label, onclick }, icon(name));
}

/** A button with a text. */
export const textButton = (text, onclick, className = "plain") => make("button", { type: "button", className, onclick }, text);

/** A button that copies the result of `text()`, and confirms it for a moment. */
export function copyButton(text, label = "Copy") {
  const made = button("copy", label, async () => {
    await copy(text());
    made.replaceChildren(icon("done"));
    say("Copied");
    setTimeout(() => made.replaceChildren(icon("copy")), 1500);
  });
  return made;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", { value: text, className: "unseen" }); // plain http has no clipboard
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

const fileName = (name) => {
  const [, stem, suffix] = /^(.*?)(\.\w{1,8})?$/s.exec(name.replace(/[^\p{L}\p{N} ._-]+/gu, ""));
  return `${stem.slice(0, 100).replace(/^[. ]+/, "").trim() || "pagewire"}${suffix ?? ""}`;
};

/** Let the browser save a text as a file. */
export function save(name, text, type) {
  const href = URL.createObjectURL(new Blob([text], { type }));
  const link = make("a", { href, download: fileName(name) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
}

/** A name that a stranger gave, to stand within a sentence: short, of one line, and without marks that turn its direction. */
export function named(text) {
  const clean = String(text).replace(/[\p{Cc}\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]+/gu, " ").toWellFormed();
  return clean.length > 100 ? `${clean.slice(0, 99)}…` : clean;
}

/** A function that asks for `work` in a frame to come; work gets a quarter of the time at most. `cancel()` of it: not now. */
export function paced(work) {
  let [timer, frame, free] = [0, 0, 0]; // free: when the work may be done again
  const run = () => {
    [timer, frame] = [0, 0];
    const began = performance.now();
    work();
    const ended = performance.now();
    free = ended + 3 * (ended - began);
  };
  const ask = () => {
    if (timer || frame) return;
    const pause = free - performance.now();
    if (pause > 16) timer = setTimeout(run, pause);
    else frame = requestAnimationFrame(run);
  };
  ask.cancel = () => {
    clearTimeout(timer);
    cancelAnimationFrame(frame);
    [timer, frame] = [0, 0];
  };
  return ask;
}

/** Show a dialog over the page, with the focus on its heading: no button is marked, and no keyboard comes up. */
export function overlay(dialog) {
  dialog.showModal();
  dialog.querySelector("h1").focus();
}

/** Announce a text to screen readers. */
export function say(text) {
  $("status").textContent = text;
}

let timer = 0;

/** Show a text for a while, with something to do about it: notify("Deleted", "Undo", f). */
export function notify(text, label, action) {
  clearTimeout(timer);
  const close = () => $("notice").replaceChildren();
  const act = label ? [textButton(label, () => (close(), action()))] : [];
  $("notice").replaceChildren(make("span", {}, text), ...act, button("close", "Close", close));
  timer = setTimeout(close, 10_000);
}
