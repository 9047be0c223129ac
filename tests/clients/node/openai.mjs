// Prints, as JSON, what OpenAI's package for Node gets from the server at argv[2].
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "secret", maxRetries: 1 });
const ask = { model: "m", messages: [{ role: "user", content: "hi" }], temperature: 0 };
const create = (more) => client.chat.completions.create({ ...ask, ...more });

const reply = await create({});
let streamed = "";
let last;
for await (const chunk of await create({ stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  last = chunk;
}
const final = await client.chat.completions.stream({ ...ask }).finalChatCompletion();

async function refused(options, body) {
  try {
    await new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "secret", ...options }).chat.completions.create(body);
    return null;
  } catch (error) {
    return [error.constructor.name, error.status, error.code, Boolean(error.requestID)];
  }
}

const text = "x".repeat(600);
console.log(
  JSON.stringify({
    text: reply.choices[0].message.content,
    finish: reply.choices[0].finish_reason,
    streamed,
    last: [last.choices.length, last.usage.total_tokens === reply.usage.total_tokens],
    final: final.choices[0].message.content,
    short: (await create({ max_completion_tokens: 5 })).choices[0].finish_reason,
    completion: (await client.completions.create({ model: "m", prompt: "ab", max_tokens: 3 })).choices[0].finish_reason,
    models: (await client.models.list()).data.map((model) => model.id),
    wrong: await refused({ apiKey: "wrong" }, ask),
    long: await refused({}, { ...ask, messages: [{ role: "user", content: text }] }),
  }),
);
