// What the engine is and has: the model and its machine, the blocks of the KV cache, and requests by phase.

import { $, draw, make } from "../dom.js";
import { info } from "../settings/models.js";

const MOST_CELLS = 1024; // of the drawing; a cell may stand for several blocks
const COLUMNS = 64;
const MOST_DOTS = 96;
const PHASES = [
  ["waiting", "waiting"],
  ["prefill", "reading the prompt"],
  ["decode", "writing"],
];

const whole = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });

/** A number of bytes, such as "16.1 MB". */
export function bytes(value) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  const power = value < 1000 ? 0 : Math.min(Math.floor(Math.log10(value) / 3), units.length - 1);
  return `${power ? (value / 1000 ** power).toFixed(1) : value} ${units[power]}`;
}

function counted(value) {
  for (const [unit, letter] of [[1e9, "B"], [1e6, "M"], [1e3, "K"]]) if (value >= unit) return `${(value / unit).toFixed(1)}${letter}`;
  return String(value);
}

/** Show a model by its name in the metrics, and the figures of the last scrape (undefined: none yet). */
export function paint(name, figures) {
  const model = info(name);
  facts(model);
  blocks(model, figures);
  queue(model, figures);
}

let told = null; // the model whose facts are shown

function facts(model) {
  if (told === model) return;
  told = model;
  const { figures } = model ?? {};
  const rows = model
    ? [
        ["Model", model.name],
        ["Architecture", model.architecture],
        ["Device", `${model.device}${model.ranks > 1 ? `, ${model.ranks} ranks` : ""}${figures ? `, ${figures.isa}` : ""}`],
        ["Computes in", model.dtype],
        ["Context", model.max_model_len ? `${whole(model.max_model_len)} tokens` : "known once the model is loaded"],
        ["Weights", figures ? `${counted(figures.parameters)}, ${bytes(figures.weight_bytes)} (${figures.quantization ?? `${Number(figures.bits.toFixed(1))} bits`} in files)` : "unknown"],
        ["KV cache", figures ? `${bytes(model.num_blocks * model.block_size * figures.kv_token_bytes)}, ${bytes(figures.kv_token_bytes)} a token` : `${whole(model.num_blocks * model.block_size)} tokens`],
        ["A step", `up to ${whole(model.max_num_seqs)} sequences, ${whole(model.max_num_batched_tokens)} tokens`],
      ]
    : [];
  $("facts").replaceChildren(...rows.map(([term, value]) => make("div", {}, make("dt", {}, term), make("dd", {}, value))));
}

function blocks(model, figures) {
  const number = model?.num_blocks ?? 0;
  const each = Math.max(1, Math.ceil(number / MOST_CELLS));
  const cells = Math.ceil(number / each);
  const drawing = $("blocks");
  const rows = Math.max(1, Math.ceil(cells / COLUMNS));
  if (drawing.childElementCount !== cells) {
    drawing.setAttribute("viewBox", `0 0 ${COLUMNS * 10} ${rows * 10}`);
    drawing.replaceChildren(
      ...Array.from({ length: cells }, (_, i) => draw("rect", { x: (i % COLUMNS) * 10 + 1, y: Math.floor(i / COLUMNS) * 10 + 1, width: 8, height: 8, rx: 1.5 })),
    );
  }
  const used = Math.round((figures?.kv ?? 0) * number);
  [...drawing.children].forEach((cell, i) => cell.classList.toggle("used", i * each < used));
  const text = number ? `${whole(used)} of ${whole(number)} blocks in use, each for ${model.block_size} tokens${each > 1 ? `; a cell stands for ${each}` : ""}` : "No KV cache";
  $("blocks-note").textContent = text;
  drawing.setAttribute("aria-label", text);
}

function queue(model, figures) {
  const counts = PHASES.map(([phase]) => figures?.phases?.[phase] ?? 0);
  const dots = PHASES.flatMap(([phase], i) => Array.from({ length: counts[i] }, () => phase));
  $("queue").replaceChildren(...dots.slice(0, MOST_DOTS).map((phase) => make("i", { className: phase })), ...(dots.length > MOST_DOTS ? [`+${dots.length - MOST_DOTS}`] : []));
  $("queue-legend").replaceChildren(...PHASES.map(([phase, label], i) => make("span", { className: phase }, make("i"), `${counts[i]} ${label}`)));
  const batch = counts[1] + counts[2];
  $("queue-note").textContent = model ? `${batch} of ${whole(model.max_num_seqs)} places of the batch are taken` : "";
}
