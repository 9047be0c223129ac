/** Requests to the server of this page, with the key of this tab. */

import { load, save } from "./storage.js";

const KEY = "luce.key";

/** A failure for people to read. `status` is 0 where no server answered. */
export class ServerError extends Error {
  /**
   * @param {string} message
   * @param {number} [status] of HTTP
   * @param {string} [code] of the API's error
   * @param {number} [retryAfter] seconds after which the same request may succeed; 0: the server names none
   */
  constructor(message, status = 0, code = "", retryAfter = 0) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

/** The key of this tab, empty without one. */
export function key() {
  return String(load(sessionStorage, KEY) ?? "");
}

/** @param {string} value empty: no key */
export function setKey(value) {
  save(sessionStorage, KEY, value);
}

/**
 * The response to a request, if it is a success. The path follows that of the page, which a proxy may have moved.
 * @param {string} path
 * @param {RequestInit} [options]
 * @throws {ServerError | DOMException} a DOMException if `options.signal` ends it
 */
export async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  // Not Authorization: a proxy in front may want that for itself.
  if (key()) headers.set("x-api-key", key());
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { cache: "no-store", ...options, headers });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ServerError("The server does not answer.");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

/** @param {Response} response */
async function failure(response) {
  // A date instead of seconds counts as none.
  const retryAfter = Number(response.headers.get("Retry-After")) || 0;
  try {
    const { error, status, progress, reason } = await response.json();
    if (error) return new ServerError(error.message, response.status, error.code, retryAfter);
    return new ServerError(healthText(status, progress, reason), response.status, status, retryAfter);
  } catch {
    const text = `The server answered ${response.status} ${response.statusText}.`;
    return new ServerError(text, response.status, "", retryAfter);
  }
}

/**
 * @param {string} status of /health
 * @param {number | undefined} progress
 * @param {string | undefined} reason
 */
function healthText(status, progress, reason) {
  if (status === "loading") return `The model is being loaded: ${Math.floor(100 * (progress ?? 0))} %`;
  if (status === "draining") return "The server is shutting down.";
  return `The server reports an error: ${reason}`;
}

/**
 * The JSON of a GET.
 * @param {string} path
 * @returns {Promise<any>}
 */
export async function json(path) {
  const response = await request(path);
  try {
    return await response.json();
  } catch {
    throw new ServerError(`The answer to ${path} ended early or is no JSON.`);
  }
}

/**
 * The text of a GET.
 * @param {string} path
 */
export async function text(path) {
  const response = await request(path);
  try {
    return await response.text();
  } catch {
    throw new ServerError(`The answer to ${path} ended early.`);
  }
}
