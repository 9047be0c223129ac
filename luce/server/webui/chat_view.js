/** The chat: sends what the user writes, and shows the replies as they come. */

import { asJson, asMarkdown, newConversation, requestMessages, say, title } from "./conversation.js";
import * as store from "./conversation_store.js";
import { button, element, find } from "./dom.js";
import { number } from "./format.js";
import { MessageView } from "./message_view.js";
import { reply } from "./reply.js";
import { chosen, SamplingForm } from "./sampling.js";
import { ServerError } from "./server.js";

/**
 * @typedef {import("./conversation.js").Message} Message
 * @typedef {import("./reply.js").Piece} Piece
 */

/** Time between two times that a growing conversation is kept. */
const KEEP_MS = 2000;
/** Distance from the end, in pixels, at which the page follows a reply. */
const FOLLOW = 80;
/** Why a reply ended, where it is not its own end. */
const CAUSES = new Map([
  ["length", "The reply reached its limit of tokens."],
  ["context", "The context is full."],
  ["deadline", "The time of the request was over."],
  ["shutdown", "The server was shut down."],
  ["cancelled", "The server cancelled the reply."],
]);

export class ChatView {
  /**
   * @param {() => string} model the name that requests send, empty for none
   * @param {() => void} refused called where the server wants another key
   */
  constructor(model, refused) {
    this.model = model;
    this.refused = refused;
    /** @type {any} /props of the model */
    this.props = null;
    this.conversation = store.current();
    /** @type {AbortController | null} ends the reply that comes */
    this.running = null;
    /** @type {MessageView[]} */
    this.views = [];
    this.messages = find("messages", HTMLElement);
    this.prompt = find("prompt", HTMLTextAreaElement);
    this.picker = find("conversations", HTMLSelectElement);
    this.sendButton = find("send", HTMLButtonElement);
    this.stopButton = find("stop", HTMLButtonElement);
    this.form = new SamplingForm(find("sampling", HTMLElement));
    this.bindComposer();
    this.bindToolbar();
    this.bindOptions();
    this.show();
  }

  bindComposer() {
    find("composer", HTMLFormElement).addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    this.stopButton.addEventListener("click", () => this.stop());
    find("chat-view", HTMLElement).addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    // A reply that comes while the page is closed is cut: what is there is kept.
    window.addEventListener("pagehide", () => this.running && this.keep());
  }

  bindToolbar() {
    find("new-conversation", HTMLElement).addEventListener("click", () => this.open(newConversation(this.conversation.system)));
    find("delete-conversation", HTMLElement).addEventListener("click", () => {
      if (!confirm(`Delete “${title(this.conversation)}”?`)) return;
      this.stop();
      store.remove(this.conversation);
      this.open(newConversation(this.conversation.system));
    });
    find("export-markdown", HTMLElement).addEventListener("click", () => this.export("md", "text/markdown", asMarkdown));
    find("export-json", HTMLElement).addEventListener("click", () => this.export("json", "application/json", asJson));
    this.picker.addEventListener("change", () => {
      const found = store.conversations().find(({ id }) => id === this.picker.value);
      this.open(found ?? newConversation(this.conversation.system));
    });
  }

  bindOptions() {
    const dialog = find("options-dialog", HTMLDialogElement);
    const system = find("system", HTMLTextAreaElement);
    find("open-options", HTMLElement).addEventListener("click", () => {
      system.value = this.conversation.system;
      this.form.show(this.props);
      dialog.returnValue = "";
      dialog.showModal();
    });
    find("reset-options", HTMLElement).addEventListener("click", () => {
      system.value = "";
      this.form.clear();
    });
    dialog.addEventListener("close", () => {
      if (dialog.returnValue !== "use") return;
      this.form.use();
      this.conversation.system = system.value;
      if (this.conversation.messages.length) this.keep();
    });
  }

  /** @param {import("./conversation.js").Conversation} conversation */
  open(conversation) {
    this.stop();
    this.conversation = conversation;
    store.select(conversation);
    this.show();
    this.prompt.focus();
  }

  /** Shows all messages of the conversation. */
  show() {
    this.views = this.conversation.messages.map((message) => new MessageView(message));
    this.messages.replaceChildren(...this.views.map(({ root }) => root));
    this.messages.scrollTop = this.messages.scrollHeight;
    this.showList();
    this.showState();
  }

  showList() {
    const { id } = this.conversation;
    const listed = store.conversations();
    if (!listed.some((each) => each.id === id)) listed.unshift(this.conversation);
    this.picker.replaceChildren(...listed.map((each) => element("option", { value: each.id }, title(each))));
    this.picker.value = id;
  }

  /** Shows which buttons make sense now. */
  showState() {
    const running = this.running !== null;
    this.sendButton.hidden = running;
    this.stopButton.hidden = !running;
    this.messages.setAttribute("aria-busy", String(running));
    for (const view of this.views) view.buttons.replaceChildren();
    const last = this.views.at(-1);
    if (last && !running) {
      const text = last.message.role === "user" ? "Try again" : "Regenerate";
      last.buttons.append(button(text, () => this.regenerate()));
    }
  }

  send() {
    const content = this.prompt.value.trim();
    if (!content || this.running) return;
    this.prompt.value = "";
    say(this.conversation, content);
    store.select(this.conversation);
    this.show();
    void this.answer();
  }

  regenerate() {
    const { messages } = this.conversation;
    if (this.running) return;
    if (messages.at(-1)?.role === "assistant") messages.pop();
    this.show();
    this.prompt.focus();
    void this.answer();
  }

  /** Ends the reply that comes; what is there of it stays. */
  stop() {
    this.running?.abort();
  }

  /** Gets a reply to the conversation. */
  async answer() {
    const { conversation } = this;
    const running = (this.running = new AbortController());
    const model = this.model();
    const body = { ...(model && { model }), ...chosen(), messages: requestMessages(conversation) };
    /** @type {Message} */
    const message = { role: "assistant", content: "" };
    conversation.messages.push(message);
    const view = new MessageView(message);
    this.views.push(view);
    this.messages.append(view.root);
    this.showState();
    this.keep();
    const drawing = new Drawing(this.messages, view);
    let kept = performance.now();
    try {
      for await (const piece of reply(body, running.signal)) {
        if (running.signal.aborted) break;
        take(message, piece);
        drawing.request(doing(piece, message));
        if (performance.now() - kept > KEEP_MS) {
          kept = performance.now();
          store.keep(conversation);
        }
      }
      if (running.signal.aborted) message.note = "Stopped.";
    } catch (error) {
      message.note = running.signal.aborted ? "Stopped." : error instanceof Error ? error.message : String(error);
      if (error instanceof ServerError && error.status === 401) this.refused();
    }
    drawing.end();
    if (this.running === running) this.running = null;
    this.finish(conversation, message, view);
  }

  /**
   * Keeps a reply that has ended. One without any text leaves its note, and no message.
   * @param {import("./conversation.js").Conversation} conversation
   * @param {Message} message
   * @param {MessageView} view
   */
  finish(conversation, message, view) {
    if (!message.content && !message.reasoning && message.note) {
      conversation.messages = conversation.messages.filter((each) => each !== message);
      this.views = this.views.filter((each) => each !== view);
    }
    if (conversation === this.conversation) {
      this.keep();
      this.showState();
      return;
    }
    // The user opened another conversation; a deleted one is not brought back.
    if (store.conversations().some(({ id }) => id === conversation.id)) store.keep(conversation);
  }

  /** Keeps the conversation in the browser. */
  keep() {
    const full = !store.keep(this.conversation);
    find("storage-note", HTMLElement).hidden = !full;
    if (!this.running) this.showList();
  }

  /**
   * Saves the conversation as a file.
   * @param {string} suffix
   * @param {string} type
   * @param {(conversation: import("./conversation.js").Conversation) => string} write
   */
  export(suffix, type, write) {
    const address = URL.createObjectURL(new Blob([write(this.conversation)], { type }));
    const day = new Date().toISOString().slice(0, 10);
    element("a", { href: address, download: `luce-${day}-${this.conversation.id}.${suffix}` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  }
}

/** Draws a growing message once for each frame, and follows it where the reader is at the end. */
class Drawing {
  /**
   * @param {HTMLElement} list
   * @param {MessageView} view
   */
  constructor(list, view) {
    this.list = list;
    this.view = view;
    this.doing = "Waiting for the server…";
    this.frame = 0;
    this.request(this.doing);
  }

  /** @param {string} doing */
  request(doing) {
    this.doing = doing;
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    const { scrollHeight, scrollTop, clientHeight } = this.list;
    const follows = scrollHeight - scrollTop - clientHeight < FOLLOW;
    this.view.update(this.doing);
    if (follows) this.list.scrollTop = this.list.scrollHeight;
  }

  end() {
    cancelAnimationFrame(this.frame);
    this.doing = "";
    this.draw();
  }
}

/**
 * Adds a piece to a message.
 * @param {Message} message
 * @param {Piece} piece
 */
function take(message, piece) {
  message.content += piece.content;
  if (piece.reasoning) message.reasoning = (message.reasoning ?? "") + piece.reasoning;
  message.model = piece.model ?? message.model;
  message.timings = piece.timings ?? message.timings;
  const note = CAUSES.get(piece.cause ?? "");
  if (note) message.note = note;
}

/**
 * What happens to a reply, in a few words.
 * @param {Piece} piece
 * @param {Message} message
 */
function doing({ waiting, progress }, { timings }) {
  if (waiting) return waiting;
  if (timings) return `${number(timings.predicted_n)} tokens · ${number(timings.predicted_per_second, 1)} tokens per second`;
  if (progress) return `Reading the prompt: ${number(progress.processed)} of ${number(progress.total)} tokens`;
  return "Waiting for the server…";
}
