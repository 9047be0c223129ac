/** A reply from the server, as it comes. */

import { events } from "./event_stream.js";
import { request, ServerError } from "./server.js";

/**
 * @typedef {object} Piece what a chunk adds
 * @property {string} content
 * @property {string} reasoning
 * @property {string} [model]
 * @property {string} [cause] the last piece: why the reply ended
 * @property {{processed: number, total: number}} [progress] tokens of the prompt
 * @property {Record<string, number>} [timings] so far
 * @property {string} [waiting] what the server waits for
 */

/** The longest pause, in seconds, before a request is sent again. */
const LONGEST_PAUSE = 60;

/**
 * @param {object} body of /v1/chat/completions
 * @param {AbortSignal} signal ends the reply, on the server too
 * @returns {AsyncGenerator<Piece>}
 * @throws {ServerError | DOMException}
 */
export async function* reply(body, signal) {
  const response = yield* opened(
    { ...body, stream: true, return_progress: true, timings_per_token: true, stream_options: { include_usage: true } },
    signal,
  );
  try {
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message, 500, chunk.error.code);
      yield piece(chunk);
    }
  } catch (error) {
    if (signal.aborted || error instanceof ServerError) throw error;
    throw new ServerError("The connection to the server was lost.");
  }
  throw new ServerError("The server ended the reply early.");
}

/**
 * The response, as soon as the server gives one: a request that it refuses for now is sent again when it says.
 * @param {object} body
 * @param {AbortSignal} signal
 * @returns {AsyncGenerator<Piece, Response>}
 */
async function* opened(body, signal) {
  const options = {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  };
  for (;;) {
    try {
      return await request("v1/chat/completions", options);
    } catch (error) {
      if (!(error instanceof ServerError && error.status === 503 && error.retryAfter > 0)) throw error;
      yield { content: "", reasoning: "", waiting: `Waiting: ${error.message}` };
      await pause(Math.min(error.retryAfter, LONGEST_PAUSE), signal);
    }
  }
}

/**
 * Ends after some seconds, or when the signal does.
 * @param {number} seconds
 * @param {AbortSignal} signal
 * @returns {Promise<void>}
 */
function pause(seconds, signal) {
  return new Promise((resolve) => {
    setTimeout(resolve, 1000 * seconds);
    signal.addEventListener("abort", () => resolve(), { once: true });
  });
}

/**
 * @param {any} chunk
 * @returns {Piece}
 */
function piece({ model, choices, prompt_progress: progress, timings }) {
  const [choice] = choices;
  const { content = "", reasoning_content: reasoning = "" } = choice?.delta ?? {};
  return { content, reasoning, model, cause: choice?.finish_details?.cause, progress, timings };
}
