// How a message looks: its text, thoughts, calls, pictures, what went wrong, and what can be done with it.

import { TOUCH, button, copyButton, icon, make, named, textButton } from "../dom.js";
import { keyButton } from "../settings/settings.js";
import { codeBlock } from "../text/blocks.js";
import { show } from "../text/markdown.js";
import { empty, path, siblings } from "./conversation.js";
import { tokenView } from "./tokens.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Result of a call" };

/** The row of a message. act: what its buttons do (see `ACTIONS` of chat.js). last: it ends the conversation. */
export function row(message, conversation, act, given) {
  try {
    return built(message, conversation, act, given);
  } catch (error) {
    console.warn("A message is shown without what can be done with it:", error);
    const text = make("div", { className: "text" }, make("p", { className: "plain-text" }, message.content));
    return make("li", { className: message.role }, make("h2", { className: "unseen" }, NAMES[message.role]), text);
  }
}

function built(message, conversation, act, { last, skipped, structured, running }) {
  const { role, content, note, error } = message;
  const item = make("li", { className: role }, make("h2", { className: "unseen" }, NAMES[role]));
  if (skipped) item.classList.add("skipped");
  if (message.pictures?.length) item.append(pictures(message.pictures));
  if (role === "assistant") item.append(thoughts(message, running));
  const text = make("div", { className: "text" });
  item.append(text);
  fill(item, message, structured && !running);
  if (message.full && last) item.append(fullContext(message, conversation, act));
  else if (error) item.append(problem(message, act));
  else if (message.full) item.append(make("p", { className: "note" }, "The context was full here."));
  const told = message.running && !running ? "Interrupted: the page was closed, or another tab is at it" : (note ?? "");
  if (!running) item.append(actions(message, conversation, act, told, last));
  if (last && role === "assistant" && message.calls?.length && !running) item.append(resultForm(message, act));
  return item;
}

/** Show what a message has so far. structured: its text is to be JSON. */
export function fill(item, message, structured = false) {
  const text = item.querySelector(":scope > .text");
  if (message.role === "user") text.textContent = message.content;
  else if (message.role === "tool") text.replaceChildren(codeBlock(pretty(message.content), "json"));
  else if (structured && isJson(message.content)) text.replaceChildren(codeBlock(pretty(message.content), "json"));
  else show(text, message.content);
  if (message.reasoning) {
    const folded = item.querySelector(":scope > .thoughts");
    folded.hidden = false;
    folded.lastChild.textContent = message.reasoning.trim();
  }
  item.querySelector(":scope > .calls")?.remove();
  if (message.calls?.length) text.after(make("div", { className: "calls" }, ...message.calls.filter(Boolean).map(call)));
}

function thoughts({ content }, running) {
  const label = make("summary", {}, running && !content ? "Thinking" : "Thoughts");
  return make("details", { className: "thoughts", hidden: true, open: running && !content }, label, make("div"));
}

function call({ name, arguments: text }) {
  return make("section", { className: "call", ariaLabel: `Call of ${named(name)}` }, make("h3", {}, icon("call"), make("span", {}, "Call of ", make("code", {}, name))), codeBlock(pretty(text), "json"));
}

const isJson = (text) => pretty(text, null) !== null;

const [LONGEST, DEEPEST] = [100_000, 50]; // characters and levels of JSON: indented, more would become millions of spaces

function pretty(text, otherwise = text) {
  try {
    if (text.length > LONGEST) return otherwise;
    const value = JSON.parse(text);
    return typeof value === "object" && shallow(value) ? JSON.stringify(value, null, 2) : otherwise;
  } catch {
    return otherwise;
  }
}

const shallow = (value, left = DEEPEST) => typeof value !== "object" || value === null || (left > 0 && Object.values(value).every((inner) => shallow(inner, left - 1)));

function pictures(urls) {
  return make("div", { className: "pictures" }, ...urls.map((src, i) => make("img", { src, alt: `Picture ${i + 1}` })));
}

function problem({ error, status }, act) {
  const box = make("div", { className: "error", role: "alert" }, make("p", {}, error));
  if (status === 401) box.append(keyButton());
  if (!status) box.append(textButton("Try again", act.again));
  return box;
}

function fullContext(message, conversation, act) {
  const box = make("div", { className: "offer", role: "group", ariaLabel: "The context is full" });
  if (message.error) box.append(make("p", { role: "alert" }, message.error));
  box.append(make("p", {}, make("strong", {}, "The conversation fills the model's context. "), "It can be continued in one of these ways:"));
  const several = path(conversation).filter(({ role }) => role === "user").length > 1;
  box.append(
    ...(several ? [textButton("Leave out the oldest messages", () => act.leaveOut(message), "strong")] : []),
    textButton("New chat with this question", () => act.startOver(message)),
    textButton("Shorten the question", () => act.shorten(message)),
  );
  return box;
}

function actions(message, conversation, act, note, last) {
  const bar = make("div", { className: "actions" }, make("span", { className: "note" }, note));
  const others = siblings(conversation, message);
  if (others.length > 1) bar.append(versions(others, message, act));
  if (!empty(message)) bar.append(copyButton(() => message.content));
  if (message.role === "user") bar.append(button("edit", "Edit", () => act.edit(message)));
  if (message.role !== "assistant") return bar;
  bar.append(button("again", "Generate again", () => act.again(message)));
  if (message.cut && last && message.content) bar.append(textButton("Continue", () => act.goOn(message), "quiet"));
  if (empty(message)) return bar;
  bar.append(button("branch", "Branch into a new chat", () => act.branch(message)));
  bar.append(button("tokens", "Show tokens", () => toggleTokens(bar, message, act)));
  return bar;
}

/** "‹ 1 of 2 ›": the other versions of a message. */
function versions(others, message, act) {
  const at = others.indexOf(message);
  const step = (name, label, to) => Object.assign(button(name, label, () => act.choose(others[to])), { disabled: !others[to] });
  return make("span", { className: "versions" }, step("left", "Previous version", at - 1), `${at + 1} of ${others.length}`, step("right", "Next version", at + 1));
}

function toggleTokens(bar, message, act) {
  const shown = bar.parentElement.querySelector(".tokens");
  if (shown) return shown.remove();
  bar.after(tokenView(message, act.withTokens));
}

/** Where the user gives the results of the calls, so that the model can go on. */
function resultForm({ calls }, act) {
  const fields = calls.map(({ name }) => make("textarea", { rows: 2, ariaLabel: `Result of ${named(name)}`, placeholder: `What ${named(name)} returned` }));
  const form = make("form", { className: "editing" }, ...fields, make("button", { type: "submit", className: "strong" }, "Send the result"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    act.results(calls.map(({ id }, i) => ({ call: id, content: fields[i].value })));
  });
  return form;
}

/** Put a form in place of a message's text; `done(text)` gets the new text. Pictures stay. */
export function editor(item, message, done, cancel) {
  const area = make("textarea", { value: message.content, ariaLabel: "Edit message", rows: Math.min(12, 2 + message.content.split("\n").length) });
  const hint = make("p", { className: "hint note" }, make("kbd", {}, "Enter"), " sends, ", make("kbd", {}, "Shift"), " ", make("kbd", {}, "Enter"), " starts a new line");
  const shown = message.pictures?.length ? [pictures(message.pictures)] : [];
  const form = make("form", { className: "editing" }, ...shown, area, hint, textButton("Cancel", cancel), make("button", { type: "submit", className: "strong" }, "Send"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (area.value.trim() || shown.length) done(area.value.trim());
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    if (event.key !== "Enter" || event.target !== area || event.shiftKey || event.isComposing) return;
    if (TOUCH.matches && !event.ctrlKey && !event.metaKey) return; // as for a question: a finger sends by the button
    event.preventDefault();
    form.requestSubmit();
  });
  item.replaceChildren(form);
  area.focus();
}
