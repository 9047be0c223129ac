/** Server-sent events of a response. */

/**
 * The data of each event. Comments and fields other than `data` are left out.
 * @param {Response} response
 * @returns {AsyncGenerator<string>}
 */
export async function* events({ body }) {
  const reader = body?.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  /** @type {string[]} */
  let data = [];
  for (;;) {
    const { value, done = true } = (await reader?.read()) ?? {};
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines.map((each) => each.replace(/\r$/, ""))) {
      if (line.startsWith("data:")) {
        data.push(line.slice(5).replace(/^ /, ""));
      } else if (!line && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}
