// What the server serves, and which model is selected.

import { servedModels } from "../net/api.js";
import { $, make } from "../dom.js";

let served = []; // ServedModel of frontend/server/operate/served.py

/** Ask the server again. Throws ApiError. */
export async function load() {
  served = await servedModels();
  return served;
}

/** What is known of a model; undefined: nothing. */
export const info = (name) => served.find((model) => model.name === name);

/** The models that answer questions, and those that make embeddings of texts. */
export const generating = () => served.filter(({ tasks }) => tasks.length === 0);
export const embedding = () => served.filter(({ tasks }) => tasks.includes("embed"));

/** The model of a conversation: as selected in the settings. */
export const selected = () => info($("settings-form").elements.model.value);

/** Offer models in a list, keeping its selection, or else `wanted`. */
export function offer(select, models, wanted = "") {
  const [names, before] = [models.map(({ name }) => name), select.value || wanted];
  select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  if (names.includes(before)) select.value = before;
}
