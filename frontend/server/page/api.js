// Calls to the server of this page. Addresses are relative, so that they work under a root path.

import { EventParser } from "./sse.js";

/** An error response of the server, or (status 0) a failure to reach it. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** fetch with the API key, if there is one. Throws ApiError unless the status is a success. */
export async function call(path, options = {}) {
  const key = sessionStorage.getItem("pagewire.key");
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
  throw new ApiError(reason(text) || response.statusText || "The server refused the request.", response.status);
}

function reason(text) {
  try {
    const body = JSON.parse(text);
    return body.error?.message ?? body.message ?? body.detail ?? text;
  } catch {
    return text.slice(0, 500);
  }
}

/** The models the server has, by name. */
export async function models() {
  const { data } = await (await call("v1/models")).json();
  return data.map((model) => model.id);
}

/** One chat completion: yields its chunks as they come. Aborted by `signal`. */
export async function* chat(body, signal) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
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
