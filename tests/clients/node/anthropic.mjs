// Prints, as JSON, what Anthropic's package for Node gets from the server at argv[2].
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "secret", maxRetries: 0 });
const ask = { model: "m", max_tokens: 300, messages: [{ role: "user", content: "hi" }] };

const message = await client.messages.create(ask);
const stream = client.messages.stream(ask);
let streamed = "";
stream.on("text", (text) => (streamed += text));
const final = await stream.finalMessage();
const { input_tokens: counted } = await client.messages.countTokens({ model: "m", messages: ask.messages });
const total = (usage) => usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens;

async function refused(options, body) {
  try {
    await new Anthropic({ baseURL: process.argv[2], apiKey: "secret", ...options }).messages.create(body);
    return null;
  } catch (error) {
    return [error.constructor.name, error.status, error.error?.error?.message?.replace(/\d+ tokens/, "N tokens")];
  }
}

const text = "x".repeat(600);
console.log(
  JSON.stringify({
    content: message.content,
    stop: message.stop_reason,
    streamed,
    final: final.content,
    counted: counted === total(message.usage) && counted === total(final.usage),
    cached: final.usage.cache_read_input_tokens > 0,
    short: (await client.messages.create({ ...ask, max_tokens: 5 })).stop_reason,
    models: (await client.models.list()).data.map((model) => model.id),
    wrong: (await refused({ apiKey: "wrong" }, ask)).slice(0, 2),
    long: await refused({}, { ...ask, messages: [{ role: "user", content: text }] }),
  }),
);
