// JavaScript clients of the server's APIs: two rounds of tools in streams, typed answers, errors.
// SERVER: a server on the demo model. SCRIPTED: one whose model follows the script in a conversation; TRIP: a message
// with a script of two calls of get_weather and ANSWER; TYPED: one with the script of a typed answer.

import assert from "node:assert/strict";
import test from "node:test";

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const { SERVER, SCRIPTED, TRIP, TYPED, ANSWER } = process.env;
const WEATHER = { Oslo: "It rains.", Rome: "The sun shines." };
const City = z.object({ city: z.string() });
const Forecast = z.object({ city: z.enum(["Oslo", "Rome"]), rains: z.boolean() });
const TYPE = { city: "Oslo", rains: true };

test("openai: a runner of tools, streamed", async () => {
  const client = new OpenAI({ baseURL: SCRIPTED + "/v1", apiKey: "none", maxRetries: 0 });
  const asked = [];
  const getWeather = (given) => {
    asked.push(given.city);
    return WEATHER[given.city];
  };
  const runner = client.chat.completions.runTools({
    model: "demo",
    stream: true,
    messages: [{ role: "user", content: TRIP }],
    tools: [
      {
        type: "function",
        function: {
          name: "get_weather",
          function: getWeather,
          parse: JSON.parse,
          parameters: { type: "object", properties: { city: { type: "string" } } },
        },
      },
    ],
  });
  assert.equal(await runner.finalContent(), ANSWER);
  assert.deepEqual(asked, Object.keys(WEATHER));
});

test("openai: typed answers and responses", async () => {
  const client = new OpenAI({ baseURL: SCRIPTED + "/v1", apiKey: "none", maxRetries: 0 });
  const completion = await client.chat.completions.parse({
    model: "demo",
    messages: [{ role: "user", content: TYPED }],
    response_format: zodResponseFormat(Forecast, "forecast"),
  });
  assert.deepEqual(completion.choices[0].message.parsed, TYPE);
  const stream = client.responses.stream({ model: "demo", input: TYPED });
  let text = "";
  for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
  assert.deepEqual(JSON.parse(text), TYPE);
  assert.equal((await stream.finalResponse()).output_text, text);
});

test("openai: the demo model, and an error", async () => {
  const client = new OpenAI({ baseURL: SERVER + "/v1", apiKey: "none", maxRetries: 0 });
  const request = { model: "demo", messages: [{ role: "user", content: "A list." }], max_tokens: 12, temperature: 0 };
  const whole = await client.chat.completions.create(request);
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...request, stream: true }))
    text += chunk.choices[0]?.delta?.content ?? "";
  assert.equal(text, whole.choices[0].message.content);
  const other = await client.chat.completions.create({ ...request, model: "other" }); // on loopback, any name will do
  assert.equal(other.choices[0].message.content, text);
  await assert.rejects(client.models.retrieve("other"), OpenAI.NotFoundError);
});

test("@anthropic-ai/sdk: a runner of tools, models, an error", async () => {
  const client = new Anthropic({ baseURL: SCRIPTED, apiKey: "none", maxRetries: 0 });
  const getWeather = betaZodTool({
    name: "get_weather",
    description: "The weather of a city.",
    inputSchema: City,
    run: ({ city }) => WEATHER[city],
  });
  for (const stream of [false, true]) {
    const runner = client.beta.messages.toolRunner({
      model: "demo",
      max_tokens: 200,
      stream,
      messages: [{ role: "user", content: TRIP }],
      tools: [getWeather],
    });
    const message = await runner.runUntilDone();
    assert.equal(message.stop_reason, "end_turn");
    assert.equal(message.content[0].text, ANSWER);
  }
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.deepEqual(names, ["demo"]);
  const bad = { model: "other", max_tokens: 0, messages: [{ role: "user", content: "x" }] };
  await assert.rejects(client.messages.create(bad), Anthropic.BadRequestError);
  await assert.rejects(client.models.retrieve("other"), Anthropic.NotFoundError);
});

const providers = {
  "openai-compatible": () =>
    createOpenAICompatible({
      name: "pagewire",
      baseURL: SCRIPTED + "/v1",
      includeUsage: true,
      supportsStructuredOutputs: true,
    }),
  anthropic: () => createAnthropic({ baseURL: SCRIPTED + "/v1", apiKey: "none" }),
};
for (const [name, provider] of Object.entries(providers)) {
  test(`ai with ${name}: two rounds of tools, streamed, and a typed answer`, async () => {
    const model = provider()("demo");
    const tools = {
      get_weather: tool({ description: "The weather.", inputSchema: City, execute: ({ city }) => WEATHER[city] }),
    };
    const result = streamText({ model, prompt: TRIP, tools, stopWhen: stepCountIs(5), maxRetries: 0 });
    let text = "";
    for await (const delta of result.textStream) text += delta;
    assert.equal(text, ANSWER);
    const steps = await result.steps;
    assert.deepEqual(
      steps.flatMap((step) => step.toolResults.map((found) => found.output)),
      Object.values(WEATHER),
    );
    assert.ok((await result.totalUsage).outputTokens > 0);
    const output = Output.object({ schema: Forecast });
    const typed = await generateText({ model, prompt: TYPED, output, maxRetries: 0 });
    assert.deepEqual(typed.output, TYPE);
  });
}
