// One question to two models, or to one model with different settings, side by side.

import { $, copyButton, make, paced, say, textButton } from "../dom.js";
import { generating, info, offer } from "../settings/models.js";
import { PARAMETERS, field, showDefaults, values } from "../settings/parameters.js";
import { keyButton, probabilityFields, read, system } from "../settings/settings.js";
import { answer } from "./answer.js";
import { fill } from "./messages.js";
import { tokenView } from "./tokens.js";

const VARIED = ["temperature", "top_p", "top_k", "min_p", "seed", "max_tokens"]; // what columns may have of their own
const columns = [column("A"), column("B")];
let controls = []; // of the answers in progress
let second = false; // a second column is wanted, though there is one model
const shown = () => columns.filter(({ node }) => !node.hidden);

/** Connect the view's events. */
export function open() {
  $("columns").append(...columns.map(({ node }) => node));
  $("compare-form").addEventListener("submit", (event) => (event.preventDefault(), run()));
  $("compare-question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    run();
  });
  $("second-column").onclick = () => ((second = !second), arrange());
  $("compare-stop").onclick = () => controls.forEach((control) => control.abort());
}

/** Offer the models of the server. */
export function showModels() {
  const models = generating();
  columns.forEach(({ model, form }, i) => {
    offer(model, models, models[i]?.name ?? models[0]?.name);
    showDefaults(form, info(model.value)?.defaults);
  });
  arrange();
}

/** A column for each of two models. One model has one, and another for other settings if the user wants it. */
function arrange() {
  const several = generating().length > 1;
  columns[1].node.hidden = !several && !second;
  $("second-column").hidden = several;
  $("second-column").textContent = second ? "Remove the second column" : "Add a column with other settings";
}

function column(letter) {
  const model = make("select", { name: "model" });
  const fields = PARAMETERS.filter(({ name }) => VARIED.includes(name)).map(field);
  const more = make("details", {}, make("summary", {}, "Settings of its own"), make("div", { className: "parameters" }, ...fields));
  const form = make("form", { autocomplete: "off" }, make("label", {}, make("span", {}, `Model ${letter}`), model), more);
  const answers = make("div", { className: "answer", ariaLive: "off" });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", () => showDefaults(form, info(model.value)?.defaults));
  return { form, model, answers, node: make("section", { className: "column", ariaLabel: `Answer ${letter}` }, form, answers) };
}

async function run() {
  const text = $("compare-question").value.trim();
  if (!text || controls.length) return;
  const asked = shown();
  controls = asked.map(() => new AbortController());
  $("compare-problem").replaceChildren();
  $("compare-run").hidden = true;
  $("compare-stop").hidden = false;
  $("second-column").disabled = true;
  say(asked.length > 1 ? "Generating both answers" : "Generating the answer");
  const messages = await Promise.all(asked.map((one, i) => ask(one, text, controls[i].signal)));
  controls = [];
  $("second-column").disabled = false;
  tellOnce(asked, messages);
  $("compare-run").hidden = false;
  $("compare-stop").hidden = true;
  if (!messages.some(({ error }) => error)) say(asked.length > 1 ? "Both answers are there" : "The answer is there");
}

/** What went wrong in the same way in both columns stands above them. */
function tellOnce(asked, [{ error }, ...others]) {
  if (!error || !others.length || others.some((other) => other.error !== error)) return;
  const [box, ...more] = asked.map(({ answers }) => answers.querySelector(".error"));
  for (const other of more) other.remove();
  $("compare-problem").append(box);
}

async function ask({ form, model, answers }, text, signal) {
  const message = { role: "assistant", content: "" };
  const thoughts = make("details", { className: "thoughts", hidden: true }, make("summary", {}, "Thoughts"), make("div"));
  const item = make("div", { className: "assistant", ariaBusy: "true" }, thoughts, make("div", { className: "text" }));
  answers.replaceChildren(item);
  const grow = paced(() => fill(item, message));
  try {
    const body = { ...read(), ...values(form), model: model.value, ...probabilityFields(model.value) };
    await answer(message, { ...body, messages: [...system(), { role: "user", content: text }] }, signal, grow);
  } catch (error) {
    message.error = error.message; // JSON in the settings
  }
  grow.cancel();
  fill(item, message);
  item.removeAttribute("aria-busy");
  if (message.error) item.append(make("div", { className: "error", role: "alert" }, make("p", {}, message.error), ...(message.status === 401 ? [keyButton()] : [])));
  item.append(make("p", { className: "note" }, message.note ?? ""));
  if (!message.content) return message;
  const toggle = () => {
    const shown = item.querySelector(".tokens");
    if (shown) shown.remove();
    else item.append(tokenView(message));
  };
  item.append(make("div", { className: "row" }, copyButton(() => message.content), textButton("Tokens", toggle, "quiet")));
  return message;
}
