// Calls to the server of this page. Addresses are relative, so that they work under a root path.

import { keptInTab } from "../storage.js";
import { EventParser } from "./sse.js";

export const KEY = "pagewire.key"; // in the storage of the tab
const LONGEST = 2000; // characters of an error that are shown

/** An error response of the server, or (status 0) a failure to reach it. code: the server's name of the error. */
export class ApiError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** fetch with the API key, if there is one. Throws ApiError unless the status is a success. */
export async function call(path, options = {}) {
  const key = keptInTab(KEY);
  if (/[^\x21-\x7e]/.test(key ?? "")) throw new ApiError("The API key has characters that no key can have.", 401);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (response.ok) return response;
  const text = await response.text();
  const { message, code } = reason(text);
  throw new ApiError(message || response.statusText || "The server refused the request.", response.status, code);
}

function reason(text) {
  try {
    const body = JSON.parse(text);
    const message = [body.error?.message, body.message, body.detail].find((given) => typeof given === "string") ?? text;
    return { message: message.slice(0, LONGEST), code: body.error?.code ?? null };
  } catch {
    return { message: text.slice(0, LONGEST), code: null };
  }
}

/** POST an object as JSON. Halves of characters, which servers refuse, are replaced. */
export const post = (path, body, signal) =>
  call(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body, wellFormed), signal });

const wellFormed = (_, value) => (typeof value === "string" ? value.toWellFormed() : value);

/** What the server says of each model it serves (ServedModel in frontend/server/operate/served.py). */
export const servedModels = async () => (await call("page/models")).json();

/** The number of tokens that these messages are for a model. */
export const countTokens = async (model, messages) => (await (await post("tokenize", { model, messages })).json()).count;

/** One chat completion: yields its chunks as they come. Aborted by `signal`; `begun` gets the response's headers. */
export async function* chat(body, signal, begun = () => {}) {
  const response = await post("v1/chat/completions", { ...body, stream: true }, signal);
  begun(response.headers);
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError("The answer ended early: the connection was closed.");
    for (const { data } of parser.feed(value)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, chunk.error.code);
      yield chunk;
    }
  }
}
