// The sampling parameters: names, ranges, and what each does. Their fields are made here, for the settings and for columns
// of a comparison.

import { make } from "../dom.js";

export const PARAMETERS = [
  {
    name: "temperature",
    label: "Temperature",
    min: 0,
    max: 2,
    step: "any",
    text: "How much chance there is. 0 always takes the most likely token; above 1, unlikely ones come often.",
  },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1, text: "The answer is cut off after this many tokens." },
  {
    name: "top_p",
    label: "Top p",
    min: 0,
    max: 1,
    step: "any",
    text: "Chooses among the likeliest tokens that have this probability together. 1: among all.",
  },
  { name: "top_k", label: "Top k", min: -1, step: 1, text: "Chooses among this many of the likeliest tokens. 0 or −1: among all." },
  {
    name: "min_p",
    label: "Min p",
    min: 0,
    max: 1,
    step: "any",
    text: "Leaves out tokens less likely than this part of the likeliest one's probability.",
  },
  { name: "seed", label: "Seed", step: 1, unset: "random", text: "The same number and settings give the same answer again." },
  {
    name: "presence_penalty",
    label: "Presence penalty",
    min: -2,
    max: 2,
    step: "any",
    unset: 0,
    text: "Above 0: tokens that the answer has already become less likely, however often they came.",
  },
  {
    name: "frequency_penalty",
    label: "Frequency penalty",
    min: -2,
    max: 2,
    step: "any",
    unset: 0,
    text: "Above 0: the more often the answer has a token, the less likely it becomes.",
  },
  {
    name: "repetition_penalty",
    label: "Repetition penalty",
    min: 0.01,
    step: "any",
    text: "Above 1: tokens of the question or the answer become less likely to come again.",
  },
];

/** The field of a parameter, as a label with its explanation. */
export function field({ name, label, text, unset, ...range }) {
  const input = make("input", { name, type: "number", placeholder: unset ?? "default", ...range });
  return make("label", {}, make("span", {}, label), input, make("small", {}, text));
}

/** The request fields of a form's parameters; an empty field is not sent. */
export function values(form) {
  const given = [...form.querySelectorAll("input[type=number]")].filter(({ value }) => value !== "");
  return Object.fromEntries(given.map(({ name, value }) => [name, Number(value)]));
}

/** Show a model's own values where nothing is given. */
export function showDefaults(form, defaults = {}) {
  for (const { name } of PARAMETERS) {
    const input = form.querySelector(`input[name=${name}]`);
    if (input && defaults[name] !== undefined) input.placeholder = `${defaults[name]} (default)`;
  }
}
