/** Conversations: their messages, what a request sends of them, and files of them. */

/**
 * @typedef {object} Message
 * @property {"user" | "assistant"} role
 * @property {string} content
 * @property {string} [reasoning] what the model wrote before its reply
 * @property {string} [model] the name that the server answered with
 * @property {string} [note] why the reply ended early
 * @property {Record<string, number>} [timings] of the API
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} system the system prompt
 * @property {number} changed time in ms
 * @property {Message[]} messages
 */

const TITLE = 60;

/**
 * @param {string} system
 * @returns {Conversation}
 */
export function newConversation(system) {
  // Not crypto.randomUUID: a page that came over plain HTTP from another machine does not have it.
  const id = [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, system, changed: Date.now(), messages: [] };
}

/** @param {Conversation} conversation */
export function title({ messages }) {
  const first = messages[0]?.content.trim().replace(/\s+/g, " ") ?? "New conversation";
  return first.length > TITLE ? `${first.slice(0, TITLE)}…` : first;
}

/**
 * Adds a message of the user; to the one before, if that has no reply: many templates want the roles to alternate.
 * @param {Conversation} conversation
 * @param {string} content
 */
export function say({ messages }, content) {
  const last = messages.at(-1);
  if (last?.role === "user") last.content += `\n\n${content}`;
  else messages.push({ role: "user", content });
}

/**
 * The messages of a request for the next reply. The chat template decides what becomes of the reasoning.
 * @param {Conversation} conversation
 */
export function requestMessages({ system, messages }) {
  const first = system.trim() ? [{ role: "system", content: system }] : [];
  const rest = messages.map(({ role, content, reasoning }) =>
    reasoning ? { role, content, reasoning_content: reasoning } : { role, content },
  );
  return [...first, ...rest];
}

/** @param {Conversation} conversation */
export function asMarkdown({ system, messages }) {
  const parts = system.trim() ? [`## System\n\n${system}`] : [];
  for (const { role, content, reasoning, model } of messages) {
    const name = role === "user" ? "User" : (model ?? "Assistant");
    // A fence longer than any in the reasoning.
    const fence = "`".repeat(Math.max(3, ...[...(reasoning ?? "").matchAll(/`+/g)].map(([run]) => run.length + 1)));
    const thought = reasoning ? `${fence}reasoning\n${reasoning.trim()}\n${fence}\n\n` : "";
    parts.push(`## ${name}\n\n${thought}${content}`);
  }
  return `${parts.join("\n\n")}\n`;
}

/**
 * The conversation in the form of the API.
 * @param {Conversation} conversation
 */
export function asJson(conversation) {
  return `${JSON.stringify({ messages: requestMessages(conversation) }, null, 2)}\n`;
}
