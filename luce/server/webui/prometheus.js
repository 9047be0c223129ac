/** The Prometheus text format. */

/** @typedef {{labels: Record<string, string>, value: number}} Sample */

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const SPECIAL = new Map([["+Inf", Infinity], ["-Inf", -Infinity], ["NaN", NaN]]);

/**
 * Samples by the name of their metric.
 * @param {string} text
 * @returns {Map<string, Sample[]>}
 */
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    const [, name, written = "", value] = match;
    /** @type {Record<string, string>} */
    const labels = {};
    for (const [, label, escaped] of written.matchAll(LABEL)) labels[label] = unescaped(escaped);
    const samples = found.get(name) ?? [];
    samples.push({ labels, value: SPECIAL.get(value) ?? Number(value) });
    found.set(name, samples);
  }
  return found;
}

/** @param {string} text of a label's value */
function unescaped(text) {
  return text.replace(/\\(.)/g, (_, character) => (character === "n" ? "\n" : character));
}
