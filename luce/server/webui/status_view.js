/** The status: what `luce top` shows, as tiles, curves and tables. Numbers only. */

import { Curves } from "./curves.js";
import { element, find, setText } from "./dom.js";
import { bytes, number, percent, seconds } from "./format.js";

/**
 * @typedef {import("./summary.js").Summary} Summary
 * @typedef {{text: string, done?: number, all?: number}} Cell a text, and a bar where `all` is known
 */

/** @type {[string, (shown: Summary) => string][]} */
const TILES = [
  ["Model", ({ model }) => model],
  ["Slots", ({ busy, slots, queued }) => `${busy} of ${slots.length} busy, ${number(queued)} queued`],
  ["Generated tokens per second", ({ per_second: { generated } }) => number(generated, 1)],
  ["Prompt tokens per second", ({ per_second: { prompt } }) => number(prompt, 1)],
  ["Time to first token", (shown) => seconds(shown.time_to_first_token)],
  ["Prefix cache", ({ cache }) => `${bytes(cache.ram)} in memory, ${bytes(cache.disk)} on the disk`],
  ["Prefix cache hits", ({ cache: { hits, misses } }) => (hits + misses ? percent(hits / (hits + misses)) : "no prompts yet")],
  ["Drafting", ({ draft }) => draftText(draft)],
];

export class StatusView {
  constructor() {
    this.root = find("status-view", HTMLElement);
    this.note = find("status-note", HTMLElement);
    this.tiles = TILES.map(([label]) => {
      const value = element("dd");
      find("figures", HTMLElement).append(element("div", {}, element("dt", {}, label), value));
      return value;
    });
    this.tables = {
      devices: new LiveTable("Devices", ["Device", "Layers", "Weights", "Memory"]),
      slots: new LiveTable("Slots", ["Slot", "Prompt", "Generated tokens"]),
      models: new LiveTable("Models", ["Model", "State"]),
      daemons: new LiveTable("Daemons", ["Device", "State", "Restarts"]),
    };
    find("tables", HTMLElement).append(...Object.values(this.tables).map(({ root }) => root));
    this.curves = new Curves(find("curves", HTMLElement));
    /** @type {number | null} the last mean: in most seconds no reply begins */
    this.firstToken = null;
  }

  /**
   * Shows a summary; null: there is none now, and the last one is marked as old.
   * @param {Summary | null} shown
   * @param {string} note what is wrong with the server
   */
  update(shown, note) {
    setText(this.note, note);
    this.root.classList.toggle("old", shown === null);
    this.curves.add(shown);
    if (!shown) return;
    this.firstToken = shown.time_to_first_token ?? this.firstToken;
    this.fill({ ...shown, time_to_first_token: this.firstToken });
  }

  /** @param {Summary} shown */
  fill(shown) {
    TILES.forEach(([, value], index) => setText(this.tiles[index], value(shown)));
    const { devices, slots, models, daemons } = this.tables;
    devices.fill(
      shown.devices.map(({ device, layers, weights, free, total }) => [
        { text: device },
        { text: layers ? `${layers[0]}..${layers[1]}` : "–" },
        { text: bytes(weights) },
        memory(free, total),
      ]),
    );
    slots.fill(
      shown.slots.map(({ id, busy, prompt, prompt_done, generated }) => [
        { text: `${id}${busy ? "" : ", idle"}` },
        busy ? { text: `${number(prompt_done)} of ${number(prompt)}`, done: prompt_done, all: prompt } : { text: "–" },
        { text: busy ? number(generated) : "–" },
      ]),
    );
    const several = shown.models.length > 1 ? shown.models : [];
    models.fill(several.map(({ id, state, pinned }) => [{ text: id }, { text: pinned ? `${state}, pinned` : state }]));
    daemons.fill(
      shown.daemons.map(({ device, up, restarts }) => [
        { text: device },
        { text: up ? "up" : "DOWN" },
        { text: number(restarts ?? 0) },
      ]),
    );
  }
}

/** @param {Summary["draft"]} draft */
function draftText(draft) {
  if (!draft) return "off";
  if (!draft.on) return "off after a failure";
  return draft.acceptance === null ? "on" : `on, ${percent(draft.acceptance)} accepted`;
}

/**
 * @param {number | null} free
 * @param {number | null} total
 * @returns {Cell}
 */
function memory(free, total) {
  if (free === null || !total) return { text: "not known" };
  return { text: `${bytes(total - free)} of ${bytes(total)}`, done: total - free, all: total };
}

/** A table whose cells change in place; hidden while it has no rows. */
class LiveTable {
  /**
   * @param {string} caption
   * @param {string[]} head
   */
  constructor(caption, head) {
    this.body = element("tbody");
    const cells = head.map((text) => element("th", { scope: "col" }, text));
    const table = element("table", {}, element("caption", {}, caption), element("thead", {}, element("tr", {}, ...cells)));
    table.append(this.body);
    this.root = element("div", { class: "table", hidden: true }, table);
  }

  /** @param {Cell[][]} rows */
  fill(rows) {
    this.root.hidden = !rows.length;
    while (this.body.rows.length > rows.length) this.body.deleteRow(-1);
    rows.forEach((cells, index) => {
      const row = this.body.rows[index] ?? this.body.insertRow();
      cells.forEach((cell, column) => fillCell(row.cells[column] ?? row.insertCell(), cell));
    });
  }
}

/**
 * @param {HTMLTableCellElement} target
 * @param {Cell} cell
 */
function fillCell(target, { text, done = 0, all }) {
  let [label, bar] = /** @type {[Element?, HTMLProgressElement?]} */ ([...target.children]);
  if (!label) target.append((label = element("span")));
  setText(label, text);
  if (!all) bar?.remove();
  else {
    if (!bar) target.append((bar = element("progress", { "aria-hidden": "true" })));
    bar.max = all;
    bar.value = done;
  }
}
