// The settings panel: request fields and the API key. Stored in this browser; the API key only in this tab.

import { KEY } from "../net/api.js";
import { $, make, notify, overlay } from "../dom.js";
import { keep as store, keepInTab, kept as stored, keptInTab } from "../storage.js";
import { generating, info, load, offer } from "./models.js";
import { PARAMETERS, field, showDefaults, values } from "./parameters.js";

const KEPT = "pagewire.settings";
const WIDE = matchMedia("(min-width: 64rem)"); // as in page.css
const MOST_ALTERNATIVES = 5; // of a token
const form = $("settings-form");
const panel = $("settings");

/** The request fields of the form. last: the role of the message to answer. Throws SyntaxError where JSON is not. */
export function read(last = "user") {
  const { model, stop, tools, schema, probabilities } = form.elements;
  const fields = { model: model.value, ...values(form) };
  const stops = stop.value.split("\n").filter(Boolean);
  if (stops.length) fields.stop = stops;
  if (tools.value.trim()) {
    fields.tools = [json(tools, "Tools")].flat();
    // A model whose own calls are not known can still be made to write one, and then must be let to answer.
    if (!info(model.value)?.tools) fields.tool_choice = last === "tool" ? "none" : "required";
  }
  if (schema.value.trim()) fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema: json(schema, "JSON schema") } };
  return { ...fields, ...(probabilities.checked && probabilityFields(model.value)) };
}

/** The request fields for the view of tokens. Counts in each event tell which tokens were drafts. */
export function probabilityFields(model) {
  const most = info(model)?.max_logprobs ?? MOST_ALTERNATIVES;
  const top_logprobs = most < 0 ? MOST_ALTERNATIVES : Math.min(most, MOST_ALTERNATIVES);
  return { logprobs: true, top_logprobs, stream_options: { include_usage: true, continuous_usage_stats: true } };
}

function json({ value }, label) {
  try {
    return JSON.parse(value);
  } catch (error) {
    throw new SyntaxError(`${label} in the settings: ${error.message}`);
  }
}

/** The system prompt as a list of one message, or none. */
export function system() {
  const content = form.elements.system.value.trim();
  return content ? [{ role: "system", content }] : [];
}

/** Select a model, or change another field, as if the user did. */
export function set(name, value) {
  const element = form.elements[name];
  if (element.type === "checkbox") element.checked = value;
  else element.value = value;
  element.dispatchEvent(new Event("input", { bubbles: true }));
  element.dispatchEvent(new Event("change", { bubbles: true }));
}

/** Fill the list of models from the server. Throws ApiError. */
export async function offerModels() {
  await load();
  offer(form.elements.model, generating(), kept().model);
  showDefaults(form, info(form.elements.model.value)?.defaults);
}

/** Connect the panel's events. `onModel()` is called after a change of the model or the API key. */
export function open(onModel) {
  $("parameters").append(...PARAMETERS.map(field));
  const before = kept();
  for (const element of form.elements) {
    if (element.name === "key" || !Object.hasOwn(before, element.name)) continue;
    if (element.type === "checkbox") element.checked = true;
    else element.value = before[element.name];
  }
  form.elements.key.value = keptInTab(KEY) ?? "";
  form.addEventListener("input", keep);
  form.addEventListener("change", ({ target }) => ["key", "model"].includes(target.name) && onModel());
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(() => (keep(), onModel())));
  $("open-settings").onclick = () => (panel.open ? panel.close() : reveal());
  $("close-settings").onclick = () => panel.close();
  panel.addEventListener("click", (event) => event.target === panel && panel.close()); // the backdrop
  panel.addEventListener("keydown", (event) => event.key === "Escape" && panel.close());
  panel.addEventListener("close", () => mark(false));
  WIDE.addEventListener("change", () => panel.close());
}

/** A button that opens the settings at the field of the API key: what to do about status 401. */
export function keyButton() {
  return make("button", { type: "button", className: "plain", onclick: askKey }, "Enter the API key");
}

export function askKey() {
  if (!panel.open) reveal();
  form.elements.key.focus();
}

function reveal() {
  if (WIDE.matches) {
    panel.open = true; // beside the conversation
    form.elements.model.focus();
  } else overlay(panel); // over it
  mark(true);
}

function mark(open) {
  $("open-settings").setAttribute("aria-expanded", open);
}

/** The texts of fields by their names, as `keep` stored them. What a fault or another version stored otherwise is left out. */
function kept() {
  try {
    const found = JSON.parse(stored(KEPT)) ?? {};
    return Object.fromEntries(Object.entries(found).filter(([, value]) => typeof value === "string"));
  } catch {
    return {};
  }
}

function keep() {
  const { key, ...rest } = Object.fromEntries(new FormData(form));
  if (!store(KEPT, JSON.stringify(rest))) notify("The settings cannot be stored in this browser.");
  keepInTab(KEY, key.trim() || null);
}
