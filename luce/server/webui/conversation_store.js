/** Conversations in this browser. Each tab has its own current one, so that two tabs do not overwrite each other. */

import { newConversation } from "./conversation.js";
import { load, save } from "./storage.js";

/** @typedef {import("./conversation.js").Conversation} Conversation */

const PREFIX = "luce.conversation.";
const CURRENT = "luce.current";

/**
 * All conversations that have a message, the last changed first.
 * @returns {Conversation[]}
 */
export function conversations() {
  return Object.keys(localStorage)
    .filter((name) => name.startsWith(PREFIX))
    .map((name) => load(localStorage, name))
    .filter((found) => Array.isArray(found?.messages))
    .sort((one, other) => other.changed - one.changed);
}

/** The conversation of this tab, a new one at first. */
export function current() {
  const id = load(sessionStorage, CURRENT);
  const found = id && load(localStorage, PREFIX + id);
  return Array.isArray(found?.messages) ? /** @type {Conversation} */ (found) : newConversation("");
}

/**
 * Makes a conversation that of this tab.
 * @param {Conversation} conversation
 */
export function select({ id }) {
  save(sessionStorage, CURRENT, id);
}

/**
 * Keeps a conversation. Returns whether the browser has room for it.
 * @param {Conversation} conversation
 */
export function keep(conversation) {
  conversation.changed = Date.now();
  return save(localStorage, PREFIX + conversation.id, conversation);
}

/** @param {Conversation} conversation */
export function remove({ id }) {
  localStorage.removeItem(PREFIX + id);
}
