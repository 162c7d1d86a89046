// One answer: the request, and what its stream adds to the message.

import { chat } from "../net/api.js";
import { record } from "../engine/timeline.js";
import { info } from "../settings/models.js";

/** Stream an answer into `message`; `changed()` is called after each part. Never throws: see `message.error`.
 *
 * body: the request. signal: aborts it. The message gets content, reasoning, calls, tokens, model, and then note or error.
 */
export async function answer(message, body, signal, changed) {
  const progress = { began: performance.now(), model: body.model, count: 0, accepted: 0 };
  const trace = record(body.model);
  Object.assign(message, { model: body.model, running: true });
  try {
    const request = { stream_options: { include_usage: true }, ...info(body.model)?.defaults, ...body };
    for await (const chunk of chat(request, signal, (headers) => trace.stages(headers.get("Server-Timing")))) {
      take(message, chunk, progress);
      changed();
    }
    message.note = summary(progress);
    message.full = progress.reason === "length" && progress.usage?.total_tokens >= (info(body.model)?.max_model_len ?? Infinity);
  } catch (error) {
    if (error.name === "AbortError") message.note = "Stopped";
    else {
      message.error = error.status ? `${error.message} (${error.status})` : error.message;
      message.status = error.status;
      message.full = error.code === "context_length_exceeded";
    }
  }
  if (progress.usage) message.size = progress.usage.total_tokens;
  message.cut = progress.reason === "length" && !message.full;
  message.running = false;
  trace.end(progress.usage?.completion_tokens ?? progress.count, message.error ? "failed" : message.note === "Stopped" ? "stopped" : "");
}

function take(message, { choices, usage }, progress) {
  const [choice] = choices;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice?.delta ?? {};
  if (content || reasoning || calls) progress.first ??= performance.now();
  if (content) message.content += content;
  if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
  for (const call of calls ?? []) addCall((message.calls ??= []), call);
  if (choice?.logprobs?.content) addTokens((message.tokens ??= []), choice.logprobs.content, usage, progress);
  progress.count += 1;
  progress.reason = choice?.finish_reason ?? progress.reason;
  progress.usage = usage ?? progress.usage;
}

function addCall(calls, { index, id, function: { name = "", arguments: text = "" } }) {
  if (!(index >= 0 && index <= calls.length)) throw new RangeError("The server sent a call that does not follow the one before it.");
  const call = (calls[index] ??= { id, name: "", arguments: "" });
  call.name += name;
  call.arguments += text;
}

/** Keep the tokens of an event: [text, log probability, alternatives, draft].
 *
 * A step of the engine gives its accepted drafts and one more token, so an event of one step shows which its drafts were.
 * One of several steps does not: their tokens have draft null. */
function addTokens(tokens, positions, usage, progress) {
  const accepted = usage?.completion_tokens_details?.accepted_prediction_tokens ?? 0;
  const drafts = accepted - progress.accepted;
  progress.accepted = accepted;
  positions.forEach(({ token, bytes, logprob, top_logprobs: top }, i) => {
    const draft = drafts === 0 ? false : drafts >= positions.length - 1 ? i < drafts : null;
    tokens.push([written(token, bytes), logprob, top.map((other) => [written(other.token, other.bytes), other.logprob]), draft]);
  });
}

/** The text of a token; one that is a part of a character is written as its bytes. */
function written(token, bytes) {
  if (!bytes || !token.includes("\ufffd")) return token;
  return bytes.map((byte) => `<${byte.toString(16).padStart(2, "0")}>`).join("");
}

/** "128 tokens · 96.3 per second · first after 42 ms". */
export function summary({ began, first, reason, usage }) {
  const parts = [];
  if (usage) parts.push(usage.completion_tokens === 1 ? "1 token" : `${usage.completion_tokens} tokens`);
  const seconds = (performance.now() - first) / 1000;
  if (seconds > 0.1 && usage?.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} per second`);
  if (first) parts.push(`first after ${Math.round(first - began)} ms`);
  if (reason === "length") parts.push("cut off at the token limit");
  return parts.join(" · ");
}
