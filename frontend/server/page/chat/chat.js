// The chat: the conversation in view, and what can be done with it. Answers of other conversations go on meanwhile.

import { countTokens } from "../net/api.js";
import { $, TOUCH, named, notify, paced, say } from "../dom.js";
import { embedding, generating, offer, selected } from "../settings/models.js";
import * as settings from "../settings/settings.js";
import { answer } from "./answer.js";
import { add, branch, choose, create, empty, path, prune, sent, title } from "./conversation.js";
import { examples } from "./examples.js";
import * as history from "./history.js";
import { editor, fill, row } from "./messages.js";
import * as pictures from "./pictures.js";

const SAVED = 1000; // milliseconds between two times that a growing answer is stored
const [list, scroller, question] = [$("messages"), $("scroll"), $("question")];

let current = create();
const running = new Map(); // AbortController of the answer in progress, by id of the conversation
let following = true; // keep the end of the conversation in view

/** Connect the view's events, and show the newest conversation. */
export async function open() {
  $("composer").addEventListener("submit", (event) => (event.preventDefault(), send()));
  question.addEventListener("input", fit);
  let width = 0;
  new ResizeObserver(() => {
    if (question.clientWidth === width) return;
    width = question.clientWidth;
    if (width) fit(); // else another view is shown
  }).observe(question);
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || TOUCH.matches) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", ({ key, target }) => key === "Escape" && !target.closest("dialog, .editing") && stop());
  $("stop").onclick = stop;
  $("new-chat").onclick = begin;
  $("model").onchange = () => settings.set("model", $("model").value);
  $("suggestions").addEventListener("click", ({ target }) => target.matches("button") && ask(target.textContent));
  scroller.addEventListener("scroll", () => {
    following = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 48;
  });
  pictures.open($("chat"));
  view(current);
  await history.open({
    chosen: (conversation) => (conversation ? (view(conversation), (location.hash = "chat")) : begin()),
    changed: (conversation) => running.has(conversation.id) || view(conversation),
  });
  const [newest] = history.listed();
  if (newest && current.messages.length === 0) view(newest);
}

/** Show what fits the models of the server. error: why they are not known. */
export function showModel(error = null) {
  const [model, models] = [selected(), generating()];
  $("welcome-model").textContent = model?.name ?? "the model";
  explain(...(error ? [error.message] : []), ...(error?.status === 401 ? [settings.keyButton()] : []));
  $("suggestions").hidden = !model;
  $("welcome-pictures").hidden = !model?.takes.includes("image");
  if (model) $("suggestions").querySelectorAll("button").forEach((button, i) => (button.textContent = examples(model)[i]));
  if (!model && !error && embedding().length) explain("The model of this server makes embeddings of texts: see Embed.");
  offer($("model"), models);
  if (model) $("model").value = model.name;
  $("model").hidden = models.length < 2;
  pictures.show();
  showRoom();
}

/** Say on the empty page why nothing can be asked. */
function explain(...parts) {
  $("welcome-problem").hidden = parts.length === 0;
  $("welcome-problem").replaceChildren(...parts);
}

function view(conversation) {
  current = conversation;
  following = true;
  history.select(current);
  render();
  showRoom();
}

function begin() {
  view(create());
  location.hash = "chat";
  question.focus();
}

function send() {
  const text = question.value.trim();
  const attached = running.has(current.id) || !(text || $("attached").childElementCount) ? null : pictures.take();
  if (!attached) return;
  question.value = "";
  fit();
  ask(text, attached);
}

function ask(content, attached = []) {
  add(current, { role: "user", content, ...(attached.length && { pictures: attached }) });
  return generate();
}

function stop() {
  running.get(current.id)?.abort();
}

// ---------------------------------------------------------------- answers

/** Request the next message of the conversation in view, and show it while it is generated.
 * more: further fields of the request. opening: a message that goes on. */
async function generate(more = {}, opening = null) {
  const conversation = current;
  const messages = [...settings.system(), ...sent(conversation)];
  const message = opening ?? add(conversation, { role: "assistant", content: "" });
  const control = new AbortController();
  running.set(conversation.id, control);
  following = true;
  message.running = true;
  render();
  say("Generating the answer");
  history.keep(conversation);
  let saved = performance.now();
  const show = paced(() => grow(message));
  const changed = () => {
    if (current === conversation) show();
    if (performance.now() - saved < SAVED) return;
    saved = performance.now();
    history.keep(conversation);
  };
  try {
    await answer(message, { ...settings.read(messages.at(-1)?.role), ...more, messages }, control.signal, changed);
  } catch (error) {
    Object.assign(message, { error: error.message, status: 400, running: false }); // JSON in the settings
  }
  show.cancel();
  running.delete(conversation.id);
  history.keep(conversation);
  if (current === conversation) {
    render();
    showRoom();
  } else notify(`An answer ${message.error ? "failed" : "is ready"} in “${named(title(conversation))}”.`, "Show", () => view(conversation));
  if (!message.error) say(message.note); // an error is an alert, which is read out by itself
}

/** Show what the answer in progress has more. */
function grow(message) {
  const item = list.lastChild;
  if (item?.message !== message) return; // another conversation is shown since the frame was asked for
  fill(item, message);
  const thoughts = item.querySelector(":scope > .thoughts");
  if (message.content && thoughts.open && !thoughts.dataset.closed) {
    thoughts.dataset.closed = true; // once: what the user opens stays open
    thoughts.open = false;
    thoughts.firstChild.textContent = "Thoughts";
  }
  follow();
}

/** What the buttons of messages do; nothing while an answer is generated. */
const ACTIONS = {
  again(message) {
    const from = message.parent;
    if (empty(message)) prune(current, message);
    current.leaf = from;
    return generate();
  },
  withTokens(message) {
    settings.set("probabilities", true);
    return ACTIONS.again(message);
  },
  goOn(message) {
    return generate({ continue_final_message: true, add_generation_prompt: false }, message);
  },
  edit(message) {
    const item = [...list.children].find((child) => child.message === message);
    editor(item, message, (content) => ACTIONS.replace(message, content), render);
  },
  /** Ask a question in place of another, which stays as another version unless it failed. */
  replace(message, content) {
    current.leaf = message.parent;
    const answers = current.messages.filter(({ parent }) => parent === message.id);
    if (answers.every(empty)) prune(current, message);
    if (current.since === message.id) current.since = null;
    add(current, { role: "user", content, ...(message.pictures && { pictures: message.pictures }) });
    return generate();
  },
  choose(message) {
    choose(current, message);
    history.keep(current);
    render();
  },
  branch(message) {
    const copy = branch(current, message);
    history.keep(copy);
    view(copy);
    notify("This is a new chat with the same beginning.");
  },
  results(results) {
    for (const { call, content } of results) add(current, { role: "tool", call, content });
    return generate();
  },
  async leaveOut(message) {
    const questions = path(current).filter(({ role }) => role === "user");
    const { name: model, max_model_len } = selected();
    const most = 0.7 * (max_model_len ?? Infinity); // the answer needs room, too
    const before = current.since;
    for (const { id } of questions.slice(questions.findIndex((one) => one.id === before) + 1)) {
      current.since = id;
      const kept = [...settings.system(), ...sent({ ...current, leaf: message.parent })];
      if ((await countTokens(model, kept)) <= most) {
        message.full = false;
        return message.content ? ACTIONS.choose(message) : ACTIONS.again(message);
      }
    }
    current.since = before;
    notify("The last question alone fills the context: shorten it.", "Edit", () => ACTIONS.shorten(message));
  },
  startOver(message) {
    const asked = path(current).findLast(({ role }) => role === "user");
    begin();
    return ask(asked.content, asked.pictures ?? []);
  },
  shorten() {
    ACTIONS.edit(path(current).findLast(({ role }) => role === "user"));
  },
};

/** The actions for one row: each gets its message, and waits for the end of an answer in progress. */
const actionsOf = (message) =>
  Object.fromEntries(Object.entries(ACTIONS).map(([name, act]) => [name, (given) => running.has(current.id) || act(given?.role || Array.isArray(given) ? given : message)]));

// ---------------------------------------------------------------- rendering

function render() {
  const messages = path(current);
  const from = messages.findIndex(({ id }) => id === current.since);
  const busy = running.has(current.id);
  const structured = Boolean($("settings-form").elements.schema.value.trim());
  list.replaceChildren(
    ...messages.map((message, i) => {
      const last = i === messages.length - 1;
      const item = row(message, current, actionsOf(message), { last, skipped: i < from, structured, running: busy && last });
      if (busy && last) item.setAttribute("aria-busy", "true");
      return Object.assign(item, { message });
    }),
  );
  $("welcome").hidden = messages.length > 0;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  follow();
}

/** How much of the context the conversation fills. */
function showRoom() {
  const size = path(current).findLast(({ size: known }) => known)?.size;
  const most = selected()?.max_model_len;
  $("room").hidden = !size || !most;
  if (size && most) $("room").textContent = `${size.toLocaleString("en")} of ${most.toLocaleString("en")} tokens of context`;
  $("room").classList.toggle("tight", size > 0.9 * most);
}

/** Fit the height of the composer to its text. */
function fit() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
}

function follow() {
  if (following) scroller.scrollTop = scroller.scrollHeight;
}
