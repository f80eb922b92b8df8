// Asks for text and speech as a stream and tells, as one line of JSON, what the openai package made of it.
//   node stream.mjs BASE_URL MODEL WAY      WAY: iterate, accumulate, abort or refused
import OpenAI from "openai";

const [baseURL, model, way] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const request = {
  model,
  messages: [{ role: "user", content: "Hello" }],
  max_tokens: way === "abort" ? 40 : 6,
  modalities: ["text", "audio"],
  audio: { voice: way === "refused" ? "nobody" : "ethan", format: "pcm16" },
  stream_options: { include_usage: true },
};

async function iterate() {
  const stream = await client.chat.completions.create({ ...request, stream: true });
  const told = { content: "", transcript: "", ids: [], bytes: 0, finish: [], usage: null };
  for await (const { choices, usage } of stream) {
    told.usage = usage ?? told.usage;
    for (const { delta, finish_reason } of choices) {
      told.content += delta.content ?? "";
      told.transcript += delta.audio?.transcript ?? "";
      if (delta.audio?.id) told.ids.push(delta.audio.id);
      if (delta.audio?.data) told.bytes += Buffer.from(delta.audio.data, "base64").length;
      if (finish_reason) told.finish.push(finish_reason);
    }
  }
  return told;
}

// The package's own helper joins the deltas.
async function accumulate() {
  const chunks = [];
  const runner = client.chat.completions.stream(request).on("chunk", (chunk) => chunks.push(chunk));
  const { choices } = await runner.finalChatCompletion();
  return { content: choices[0].message.content, finish: [choices[0].finish_reason], chunks: chunks.length };
}

async function abort() {
  const stream = await client.chat.completions.create({ ...request, stream: true });
  for await (const { choices } of stream) {
    if (choices[0]?.delta.audio?.data) {
      stream.controller.abort();
      return { aborted: true };
    }
  }
  return { aborted: false };
}

async function refused() {
  try {
    await client.chat.completions.create({ ...request, stream: true });
    return { refused: false };
  } catch (error) {
    const { status, param, type, message } = error;
    return { refused: error instanceof OpenAI.BadRequestError, status, param, type, message };
  }
}

console.log(JSON.stringify(await { iterate, accumulate, abort, refused }[way]()));
