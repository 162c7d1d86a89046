// The conversation: send a message, stream the answer, stop it, edit a message, generate an answer again.

import { chat } from "./api.js";
import { $, copyButton, icon, make, say } from "./dom.js";
import { show } from "./markdown.js";
import * as settings from "./settings.js";

const KEPT = "pagewire.conversation";
const TOUCH = matchMedia("(pointer: coarse)");
const [list, scroller, question] = [$("messages"), $("scroll"), $("question")];

let messages = JSON.parse(localStorage.getItem(KEPT) ?? "[]"); // {role, content, note?, error?}
let running = null; // AbortController of the answer in progress
let following = true; // keep the end of the conversation in view

/** Connect the view's events and show the stored conversation. */
export function open() {
  $("composer").addEventListener("submit", (event) => (event.preventDefault(), send()));
  question.addEventListener("input", fit);
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || TOUCH.matches) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
  $("stop").onclick = stop;
  $("new-chat").onclick = begin;
  $("suggestions").addEventListener("click", ({ target }) => target.matches("button") && ask(target.textContent));
  scroller.addEventListener("scroll", () => {
    following = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 48;
  });
  render();
}

function begin() {
  stop();
  messages = [];
  keep();
  render();
  location.hash = "chat";
  question.focus();
}

function send() {
  const text = question.value.trim();
  if (!text || running) return;
  question.value = "";
  fit();
  ask(text);
}

function ask(text) {
  messages.push({ role: "user", content: text });
  return answer();
}

function stop() {
  running?.abort();
}

/** Request the next message and show it while it is generated. */
async function answer() {
  const message = { role: "assistant", content: "" };
  const sent = [...settings.system(), ...messages.filter(({ content }) => content).map(({ role, content }) => ({ role, content }))];
  messages.push(message);
  const control = (running = new AbortController());
  following = true;
  render();
  const item = list.lastChild;
  item.setAttribute("aria-busy", "true");
  say("Generating the answer");
  let frame = 0;
  const refresh = () => {
    frame = 0;
    show(item.querySelector(".text"), message.content);
    follow();
  };
  const progress = { began: performance.now() };
  try {
    for await (const { choices, usage } of chat({ ...settings.read(), messages: sent }, control.signal)) {
      const [choice] = choices;
      if (choice?.delta?.content) {
        progress.first ??= performance.now();
        message.content += choice.delta.content;
        frame ||= requestAnimationFrame(refresh);
      }
      progress.reason = choice?.finish_reason ?? progress.reason;
      progress.usage = usage ?? progress.usage;
    }
    message.note = summary(progress);
  } catch (error) {
    if (error.name === "AbortError") message.note = "Stopped";
    else message.error = error.status ? `${error.message} (${error.status})` : error.message;
  }
  cancelAnimationFrame(frame);
  if (running === control) running = null;
  if (messages.includes(message)) {
    keep();
    render();
  }
  say(message.error ?? message.note);
}

/** "128 tokens · 96.3 per second · first after 42 ms". */
function summary({ began, first, reason, usage }) {
  const parts = [];
  if (usage) parts.push(usage.completion_tokens === 1 ? "1 token" : `${usage.completion_tokens} tokens`);
  const seconds = (performance.now() - first) / 1000;
  if (seconds > 0.1 && usage?.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} per second`);
  if (first) parts.push(`first after ${Math.round(first - began)} ms`);
  if (reason === "length") parts.push("cut off at the token limit");
  return parts.join(" · ");
}

function keep() {
  localStorage.setItem(KEPT, JSON.stringify(messages));
}

// ---------------------------------------------------------------- rendering

function render() {
  list.replaceChildren(...messages.map(row));
  $("welcome").hidden = messages.length > 0;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  follow();
}

function row(message, at) {
  const { role, content, note, error } = message;
  const text = make("div", { className: "text" });
  if (role === "user") text.textContent = content;
  else show(text, content);
  const item = make("li", { className: role }, make("h2", { className: "unseen" }, role === "user" ? "You" : "Answer"), text);
  if (error) item.append(make("p", { className: "error", role: "alert" }, error));
  const actions = make("div", { className: "actions" }, make("span", { className: "note" }, note ?? ""));
  if (content) actions.append(copyButton(() => content));
  if (role === "user") actions.append(button("edit", "Edit", () => edit(item, at)));
  else actions.append(button("again", "Generate again", () => ((messages = messages.slice(0, at)), answer())));
  item.append(actions);
  return item;
}

function button(name, label, onclick) {
  const act = () => running || onclick(); // one answer at a time
  return make("button", { type: "button", className: "quiet", title: label, ariaLabel: label, onclick: act }, icon(name));
}

/** Let the user edit a message; sending it removes the messages after it. */
function edit(item, at) {
  const area = make("textarea", { value: messages[at].content, ariaLabel: "Edit message", rows: 3 });
  const form = make(
    "form",
    { className: "editing" },
    area,
    make("button", { type: "button", className: "plain", onclick: render }, "Cancel"),
    make("button", { type: "submit", className: "strong" }, "Send"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = area.value.trim();
    if (!text || running) return;
    messages = messages.slice(0, at);
    ask(text);
  });
  form.addEventListener("keydown", (event) => event.key === "Escape" && render());
  item.replaceChildren(form);
  area.focus();
}

/** Fit the height of the composer to its text. */
function fit() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
}

function follow() {
  if (following) scroller.scrollTop = scroller.scrollHeight;
}
