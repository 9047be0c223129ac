/** Curves of the last minutes. */

import { element } from "./dom.js";
import { number } from "./format.js";
import uPlot from "./vendor/uplot/uPlot.esm.js";

/** @typedef {import("./summary.js").Summary} Summary */

/** What the time axis shows, and the points for it: the readings come once a second. */
const SECONDS = 120;
const POINTS = SECONDS;
const HEIGHT = 150;
/** @type {{label: string, value: (shown: Summary) => number | null}[]} */
const CURVES = [
  { label: "Generated tokens per second", value: (shown) => shown.per_second.generated },
  { label: "Prompt tokens per second", value: (shown) => shown.per_second.prompt },
  { label: "Sequences, running and queued", value: (shown) => shown.busy + shown.queued },
];

export class Curves {
  /** @param {HTMLElement} parent */
  constructor(parent) {
    /** @type {number[]} seconds since 1970 */
    this.times = [];
    /** @type {(number | null)[][]} */
    this.values = CURVES.map(() => []);
    this.places = CURVES.map(({ label }) => element("figure", { role: "img", "aria-label": label }));
    /** @type {any[]} */
    this.plots = [];
    parent.append(...this.places);
    this.places.forEach((place, index) => place.append(element("figcaption", {}, CURVES[index].label)));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.build());
    new ResizeObserver(() => this.resize()).observe(parent);
    this.build();
  }

  /**
   * Adds a summary; null: the server did not answer.
   * @param {Summary | null} shown
   */
  add(shown) {
    this.times.push(Date.now() / 1000);
    if (this.times.length > POINTS) this.times.shift();
    CURVES.forEach(({ value }, index) => {
      this.values[index].push(shown && value(shown));
      if (this.values[index].length > POINTS) this.values[index].shift();
    });
    this.draw();
  }

  /** Makes the plots anew, with the colours of the page. */
  build() {
    for (const plot of this.plots) plot.destroy();
    const style = getComputedStyle(document.body);
    const [line, text, grid] = ["--accent", "--muted", "--line"].map((name) => style.getPropertyValue(name).trim());
    const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
    /** @type {(plot: any, least: number, most: number) => number[]} */
    const fromZero = (_, __, most) => [0, Math.max(1, most * 1.1)];
    /** @type {(plot: any, least: number, most: number) => number[]} */
    const window = (_, __, most) => [most - SECONDS, most];
    const options = {
      height: HEIGHT,
      legend: { show: false },
      cursor: { show: false },
      scales: { x: { range: window }, y: { range: fromZero } },
      axes: [
        { ...axis, space: 70, values: (/** @type {any} */ _, /** @type {number[]} */ times) => times.map(clock) },
        { ...axis, size: 60, values: (/** @type {any} */ _, /** @type {number[]} */ all) => all.map(short) },
      ],
      series: [{}, { stroke: line, width: 2, points: { show: false } }],
    };
    const Plot = /** @type {any} */ (uPlot);
    this.plots = this.places.map(
      (place, index) => new Plot({ ...options, width: this.width(index) }, [this.times, this.values[index]], place),
    );
  }

  draw() {
    this.plots.forEach((plot, index) => {
      plot.setData([this.times, this.values[index]]);
      const now = this.values[index].at(-1);
      this.places[index].setAttribute("aria-label", `${CURVES[index].label}: ${short(now)}`);
    });
  }

  resize() {
    this.plots.forEach((plot, index) => plot.setSize({ width: this.width(index), height: HEIGHT }));
  }

  /** @param {number} index */
  width(index) {
    return Math.max(200, this.places[index].clientWidth);
  }
}

/** @param {number} time seconds since 1970 */
function clock(time) {
  return new Date(1000 * time).toLocaleTimeString([], { hour12: false });
}

/** @param {number | null | undefined} value */
function short(value) {
  return number(value, value && value < 10 ? 1 : 0);
}
