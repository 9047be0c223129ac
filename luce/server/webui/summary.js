/**
 * What a running server does: the readings and the numbers of `luce top` (luce/cli/server_status.py). No text of a prompt
 * or reply is among them.
 */

import { parseMetrics } from "./prometheus.js";
import { json, text } from "./server.js";

/**
 * @typedef {import("./prometheus.js").Sample} Sample
 * @typedef {{at: number, models: any[], props: any, slots: any[], samples: Map<string, Sample[]>}} Reading
 * `at` in seconds; entries of /v1/models; /props; /slots; /metrics
 * @typedef {ReturnType<typeof summary>} Summary
 */

/** Counters of which a rate is shown, by its name. */
const RATES = /** @type {const} */ ({
  generated: ["luce_generated_tokens_total", {}],
  prompt: ["luce_prompt_tokens_total", { source: "computed" }],
  requests: ["luce_requests_total", {}],
});

/**
 * The state of the server now, about one of its models.
 * @param {any[]} models
 * @param {string} model its name, empty: the default one
 * @returns {Promise<Reading>}
 */
export async function read(models, model) {
  const query = model ? `?model=${encodeURIComponent(model)}` : "";
  const [props, slots, metrics] = await Promise.all([json(`props${query}`), json(`slots${query}`), text("metrics")]);
  return { at: performance.now() / 1000, models, props, slots, samples: parseMetrics(metrics) };
}

/**
 * Numbers of this moment, and rates since `before`, null without it.
 * @param {Reading} now
 * @param {Reading | null} before
 */
export function summary(now, before) {
  if (before && name(before) !== name(now)) before = null;
  /** @type {Record<string, any[]>} */
  const { target_sharding: shards = [], daemons = [] } = now.props.runtime;
  return {
    model: name(now),
    models: now.models.map(({ id, state, pinned }) => ({ id, state, pinned })),
    busy: now.slots.filter((slot) => slot.is_processing).length,
    slots: now.slots.map(slotOf),
    queued: total(now, "luce_queued_sequences"),
    per_second: {
      generated: rate(now, before, ...RATES.generated),
      prompt: rate(now, before, ...RATES.prompt),
      requests: rate(now, before, ...RATES.requests),
    },
    time_to_first_token: mean(now, before, "luce_time_to_first_token_seconds"),
    devices: shards.map(deviceOf),
    cache: {
      ram: total(now, "luce_prefix_cache_bytes", { tier: "ram" }),
      disk: total(now, "luce_prefix_cache_bytes", { tier: "disk" }),
      hits: total(now, "luce_prefix_cache_hits_total"),
      misses: total(now, "luce_prefix_cache_misses_total"),
    },
    draft: draftOf(now),
    daemons: daemons.map(({ device, up, restarts }) => ({ device, up, restarts })),
  };
}

/** @param {Reading} reading */
function name(reading) {
  return String(reading.props.model_alias ?? "");
}

/**
 * The sum of a metric over the samples with these labels, those of the model where it has a label for it.
 * @param {Reading} reading
 * @param {string} metric
 * @param {Record<string, string>} [labels]
 */
function total(reading, metric, labels = {}) {
  const wanted = Object.entries(labels);
  return (reading.samples.get(metric) ?? [])
    .filter(({ labels: found }) => (found.model ?? name(reading)) === name(reading))
    .filter(({ labels: found }) => wanted.every(([label, value]) => found[label] === value))
    .reduce((sum, { value }) => sum + value, 0);
}

/**
 * What a counter grew by in a second; a server that was started anew counts from 0.
 * @param {Reading} now
 * @param {Reading | null} before
 * @param {string} metric
 * @param {Record<string, string>} labels
 */
function rate(now, before, metric, labels) {
  if (!before || now.at <= before.at) return null;
  return Math.max(0, total(now, metric, labels) - total(before, metric, labels)) / (now.at - before.at);
}

/**
 * The mean of a histogram's values since `before`; of all without it.
 * @param {Reading} now
 * @param {Reading | null} before
 * @param {string} metric
 */
function mean(now, before, metric) {
  let count = total(now, `${metric}_count`);
  let sum = total(now, `${metric}_sum`);
  if (before && total(before, `${metric}_count`) <= count) {
    count -= total(before, `${metric}_count`);
    sum -= total(before, `${metric}_sum`);
  }
  return count ? sum / count : null;
}

/** @param {any} slot */
function slotOf(slot) {
  return {
    id: slot.id,
    busy: Boolean(slot.is_processing),
    prompt: slot.n_prompt_tokens ?? 0,
    prompt_done: slot.n_prompt_tokens_processed ?? 0,
    generated: slot.next_token?.n_decoded ?? 0,
  };
}

/** @param {any} shard */
function deviceOf(shard) {
  const { free = null, total: all = null } = shard.memory ?? {};
  return { device: shard.device, layers: shard.layers, weights: shard.weights, free, total: all };
}

/** @param {Reading} now */
function draftOf(now) {
  if (!now.samples.has("luce_draft_enabled")) return null;
  const proposed = total(now, "luce_draft_tokens_total");
  const acceptance = proposed ? total(now, "luce_draft_accepted_tokens_total") / proposed : null;
  return { on: Boolean(total(now, "luce_draft_enabled")), acceptance };
}
