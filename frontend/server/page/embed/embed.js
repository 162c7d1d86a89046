// A playground for models that make embeddings: which lines of a text are nearest to a query.

import { post } from "../net/api.js";
import { $, make, say } from "../dom.js";
import { embedding, offer } from "../settings/models.js";
import { keyButton } from "../settings/settings.js";

const MOST = 2000; // lines: a request may have 2,048 inputs
const known = new Map(); // vectors of length 1, by model and text

/** Connect the view's events. */
export function open() {
  $("embed-form").addEventListener("submit", (event) => (event.preventDefault(), compare()));
}

/** Offer the models that make embeddings; without one, there is no such view. */
export function showModels() {
  const models = embedding();
  $("embed-link").hidden = models.length === 0;
  offer($("embed-form").elements.model, models);
}

async function compare() {
  const { model, query, lines } = $("embed-form").elements;
  const wanted = query.value.trim();
  const texts = [...new Set(lines.value.split("\n").map((line) => line.trim()))].filter(Boolean).slice(0, MOST);
  if (!wanted || !texts.length) return;
  $("embed-run").disabled = true;
  try {
    const began = performance.now();
    const tokens = await learn(model.value, [wanted, ...texts]);
    const target = known.get(`${model.value}\n${wanted}`);
    const found = texts.map((text) => ({ text, score: dot(target, known.get(`${model.value}\n${text}`)) }));
    found.sort((a, b) => b.score - a.score);
    show(found);
    const taken = tokens ? `${tokens} tokens in ${Math.round(performance.now() - began)} ms` : "all known from before";
    $("embed-note").replaceChildren(`${texts.length} lines · ${target.length} numbers each · ${taken}`);
    say(`Nearest line: ${found[0].text}`);
  } catch (error) {
    $("nearest").replaceChildren();
    $("embed-note").replaceChildren(error.message, ...(error.status === 401 ? [" ", keyButton()] : []));
  }
  $("embed-run").disabled = false;
}

/** Get the vectors that are not known yet; the number of tokens that were read. Throws ApiError. */
async function learn(model, texts) {
  const input = texts.filter((text) => !known.has(`${model}\n${text}`));
  if (!input.length) return 0;
  const { data, usage } = await (await post("v1/embeddings", { model, input })).json();
  for (const { index, embedding: vector } of data) {
    const size = Math.hypot(...vector) || 1;
    known.set(`${model}\n${input[index]}`, vector.map((value) => value / size));
  }
  return usage.prompt_tokens;
}

const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);

/** Lines by cosine, with bars from the least to the greatest of them. */
function show(found) {
  const [most, least] = [found[0].score, found.at(-1).score];
  const rows = found.map(({ text, score }) => {
    const bar = make("i", { ariaHidden: "true" });
    bar.style.width = `${most > least ? 4 + (96 * (score - least)) / (most - least) : 100}%`;
    const pick = () => {
      $("embed-form").elements.query.value = text;
      compare();
    };
    return make("li", {}, make("button", { type: "button", title: "Find what is near this line", onclick: pick }, make("span", {}, text), bar), make("output", {}, score.toFixed(3)));
  });
  $("nearest").replaceChildren(...rows);
}
