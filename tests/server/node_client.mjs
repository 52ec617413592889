// The `openai` client of Node: prints what it got as one JSON object. node_client.mjs URL MODEL
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello! Who are you?" }];
const input = messages[0].content;
const out = {};

const chat = await client.chat.completions.create({
  model, messages, temperature: 0, max_tokens: 8,
});
out.chat = chat.choices[0].message.content;

out.chatStream = "";
const chunks = await client.chat.completions.create({
  model, messages, temperature: 0, max_tokens: 8, stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of chunks) {
  out.chatStream += chunk.choices[0]?.delta?.content ?? "";
  out.chatUsage = chunk.usage?.completion_tokens;
}

const runner = client.chat.completions.stream({ model, messages, temperature: 0, max_tokens: 8 });
out.chatHelper = (await runner.finalChatCompletion()).choices[0].message.content;

const ask = { model, input, temperature: 0, max_output_tokens: 8 };
const response = await client.responses.create(ask);
out.response = response.output_text;

out.responseStream = "";
out.events = [];
for await (const event of await client.responses.create({ ...ask, stream: true })) {
  if (out.events.at(-1) !== event.type) out.events.push(event.type);
  if (event.type === "response.output_text.delta") out.responseStream += event.delta;
}

const helper = client.responses.stream(ask);
out.responseHelper = (await helper.finalResponse()).output_text;

const next = await client.responses.create({
  ...ask, input: "And then?", previous_response_id: response.id,
});
out.items = [];
for await (const item of client.responses.inputItems.list(next.id, { order: "asc" })) {
  out.items.push(item.role);
}
out.retrieved = (await client.responses.retrieve(response.id)).output_text;

const background = await client.responses.create({ ...ask, background: true, stream: true });
let id;
for await (const event of background) {
  if (event.type === "response.created") id = event.response.id;
  if (event.type === "response.in_progress") break;
}
out.resumed = "";
const rest = await client.responses.retrieve(id, { stream: true, starting_after: 2 });
for await (const event of rest) {
  if (event.type === "response.output_text.delta") out.resumed += event.delta;
}

await client.responses.delete(response.id);
try {
  await client.responses.retrieve(response.id);
} catch (error) {
  out.error = [error.status, error.param, error instanceof OpenAI.NotFoundError];
}
console.log(JSON.stringify(out));
