/** One message of the chat on the page. */

import { element, setText } from "./dom.js";
import { number, percent, seconds } from "./format.js";
import { render } from "./markdown.js";

/** @typedef {import("./conversation.js").Message} Message */

export class MessageView {
  /** @param {Message} message */
  constructor(message) {
    this.message = message;
    const own = message.role === "user";
    this.name = element("h2", {}, own ? "You" : (message.model ?? "Reply"));
    this.reasoningTitle = element("summary");
    this.reasoning = element("div", { class: "reasoning" });
    this.details = element("details", { hidden: true }, this.reasoningTitle, this.reasoning);
    this.content = element("div", { class: "content" });
    this.note = element("p", { class: "note", hidden: true });
    this.figures = element("p", { class: "figures", hidden: true });
    this.buttons = element("p", { class: "buttons" });
    this.root = element("article", { class: message.role }, this.name, this.details, this.content, this.note);
    this.root.append(this.figures, this.buttons);
    // Nobody sees what is folded: it is rendered when it is opened.
    this.details.addEventListener("toggle", () => this.details.open && render(this.reasoning, message.reasoning ?? ""));
    this.update();
  }

  /**
   * Shows the message as it is now.
   * @param {string} [doing] what happens to it, while something does
   */
  update(doing = "") {
    const { role, content, reasoning = "", model, note = "", timings } = this.message;
    if (role === "user") setText(this.content, content);
    else {
      setText(this.name, model ?? "Reply");
      render(this.content, content);
    }
    this.details.hidden = !reasoning;
    setText(this.reasoningTitle, doing && !content ? "Reasoning…" : "Reasoning");
    if (this.details.open) render(this.reasoning, reasoning);
    setText(this.note, note);
    this.note.hidden = !note;
    const figures = doing || (timings ? describe(timings) : "");
    setText(this.figures, figures);
    this.figures.hidden = !figures;
  }
}

/**
 * The figures of a reply in one line.
 * @param {Record<string, number>} timings
 */
function describe(timings) {
  const prompt = timings.prompt_n + timings.cache_n;
  const parts = [
    `${number(timings.predicted_n)} tokens`,
    `${number(timings.predicted_per_second, 1)} tokens per second`,
    `first token ${seconds((timings.queue_ms + timings.prompt_ms) / 1000)}`,
    `prompt ${number(prompt)}${timings.cache_n ? ` (${number(timings.cache_n)} cached)` : ""}`,
  ];
  if (timings.draft_n) parts.push(`${percent(timings.draft_n_accepted / timings.draft_n)} of drafts accepted`);
  return parts.join(" · ");
}
