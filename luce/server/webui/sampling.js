/** Sampling values of the chat's requests: a form, and what it holds. */

import { element } from "./dom.js";
import { load, save } from "./storage.js";

/**
 * @typedef {object} Field
 * @property {string} name of the request's field
 * @property {string} label
 * @property {number} min
 * @property {number} [max]
 * @property {boolean} [whole] an integer
 * @property {string} [shown] the name in /props, if it is another one
 */

const NAME = "luce.sampling";
const EFFORT = "reasoning_effort";

/** @type {Field[]} */
const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2 },
  { name: "top_p", label: "Top p", min: 0, max: 1 },
  { name: "top_k", label: "Top k", min: 0, whole: true },
  { name: "min_p", label: "Min p", min: 0, max: 1 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 10, shown: "repeat_penalty" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2 },
  { name: "max_completion_tokens", label: "Longest reply, tokens", min: 1, whole: true },
  { name: "seed", label: "Seed", min: 0, max: Number.MAX_SAFE_INTEGER, whole: true },
];

/** The chosen values by the names of request fields. */
export function chosen() {
  return /** @type {Record<string, number | string>} */ (load(localStorage, NAME) ?? {});
}

/** The fields of a form, whose defaults and efforts are those of a model. */
export class SamplingForm {
  /** @param {HTMLElement} parent */
  constructor(parent) {
    this.inputs = new Map(FIELDS.map((field) => [field.name, numberInput(field)]));
    this.effort = element("select", { name: EFFORT });
    this.effortLabel = element("label", {}, "Reasoning effort ", this.effort);
    const labels = FIELDS.map(({ name, label }) => element("label", {}, `${label} `, this.inputs.get(name) ?? ""));
    parent.append(...labels, this.effortLabel);
  }

  /**
   * Shows the chosen values.
   * @param {any} props those of the model; null while they are unknown
   */
  show(props) {
    const defaults = props?.default_generation_settings ?? {};
    const values = chosen();
    for (const { name, shown = name } of FIELDS) {
      const input = this.inputs.get(name);
      if (!input) continue;
      input.value = String(values[name] ?? "");
      input.placeholder = String(defaults[shown] ?? "");
    }
    const efforts = props?.reasoning?.supported ? props.reasoning.supported_efforts : [];
    const options = ["", ...new Set(["none", ...efforts])];
    this.effort.replaceChildren(...options.map((value) => element("option", { value }, value || "as the server has it")));
    this.effort.value = String(values[EFFORT] ?? "");
    this.effortLabel.hidden = !efforts.length;
  }

  /** Empties the fields. */
  clear() {
    for (const input of [...this.inputs.values(), this.effort]) input.value = "";
  }

  /** Makes what the fields hold the chosen values. */
  use() {
    const numbers = [...this.inputs].filter(([, input]) => input.value).map(([name, input]) => [name, input.valueAsNumber]);
    save(localStorage, NAME, { ...Object.fromEntries(numbers), ...(this.effort.value && { [EFFORT]: this.effort.value }) });
  }
}

/** @param {Field} field */
function numberInput({ name, min, max, whole }) {
  return element("input", { type: "number", name, min, max: max ?? false, step: whole ? 1 : "any", inputmode: "decimal" });
}
