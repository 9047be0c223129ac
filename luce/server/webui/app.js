/** The page: which view is shown, and what the server does meanwhile. */

import { ChatView } from "./chat_view.js";
import { element, find, setText } from "./dom.js";
import { askForKey, onKey } from "./key_dialog.js";
import { json, ServerError } from "./server.js";
import { StatusView } from "./status_view.js";
import { load, save } from "./storage.js";
import { read, summary } from "./summary.js";

/** Pauses between two readings in ms: of the status, and of no more than whether the server answers. */
const READING_PAUSE = 1000;
const HEALTH_PAUSE = 5000;
const MODEL = "luce.model";

const connection = find("connection", HTMLElement);
const picker = find("model", HTMLSelectElement);
const status = new StatusView();
const chat = new ChatView(model, refused);

/** @type {import("./summary.js").Reading | null} */
let before = null;
/** Whether the server wants a key that this tab does not have. */
let locked = false;
/** Ends the present pause. */
let wake = () => {};

/** The chosen model, empty where the server has one only. */
function model() {
  return picker.options.length > 1 ? picker.value : "";
}

function statusShown() {
  return location.hash === "#status";
}

function refused() {
  locked = true;
  askForKey(true);
}

/** Shows the view that the address names. */
function showView() {
  find("chat-view", HTMLElement).hidden = statusShown();
  find("status-view", HTMLElement).hidden = !statusShown();
  for (const link of document.querySelectorAll("nav a")) {
    const current = link.getAttribute("href") === (statusShown() ? "#status" : "#chat");
    link.setAttribute("aria-current", current ? "page" : "false");
  }
  document.title = statusShown() ? "Status – Luce" : "Luce";
  if (!statusShown()) find("prompt", HTMLElement).focus();
  before = null;
  wake();
}

/** @param {any[]} models entries of /v1/models */
function showModels(models) {
  find("model-label", HTMLElement).hidden = models.length < 2;
  const names = models.map(({ id }) => String(id));
  if (names.join("\n") === [...picker.options].map(({ value }) => value).join("\n")) return;
  const wanted = picker.value || load(sessionStorage, MODEL);
  picker.replaceChildren(...names.map((value) => element("option", { value }, value)));
  picker.value = names.includes(wanted) ? wanted : (names[0] ?? "");
}

/**
 * Looks at the server once, and shows what the view needs. Returns what is wrong, empty if nothing is.
 * @throws {ServerError}
 */
async function look() {
  const wrong = await sick();
  const { data: models } = await json("v1/models");
  showModels(models);
  if (statusShown()) {
    const now = await read(models, model());
    chat.props = now.props;
    status.update(summary(now, before), wrong);
    before = now;
  } else {
    chat.props ??= await json(model() ? `props?model=${encodeURIComponent(model())}` : "props");
  }
  return wrong;
}

/** Why a server that answers cannot compute, empty if it can: its numbers tell which daemon is lost. */
async function sick() {
  try {
    await json("health");
    return "";
  } catch (error) {
    if (error instanceof ServerError && error.code === "error") return error.message;
    throw error;
  }
}

/**
 * Shows that there are no numbers now.
 * @param {unknown} error
 */
function failed(error) {
  if (!(error instanceof ServerError)) throw error;
  before = chat.props = null;
  if (error.status === 401) refused();
  if (statusShown()) status.update(null, error.message);
  // The model is one of several and is not loaded: a request loads it.
  return error.code === "not_loaded" ? "" : error.message;
}

/** Looks at the server again and again while somebody sees the page. */
async function watch() {
  for (;;) {
    if (!document.hidden && !locked) {
      const wrong = await look().catch(failed);
      setText(connection, wrong || "Connected");
      connection.classList.toggle("wrong", wrong !== "");
    }
    const pause = statusShown() || connection.classList.contains("wrong") ? READING_PAUSE : HEALTH_PAUSE;
    await new Promise((resolve) => {
      wake = () => resolve(undefined);
      setTimeout(wake, pause);
    });
  }
}

onKey(() => {
  locked = false;
  wake();
});
picker.addEventListener("change", () => {
  save(sessionStorage, MODEL, picker.value);
  chat.props = null;
  wake();
});
for (const cancel of document.querySelectorAll("dialog .cancel")) {
  cancel.addEventListener("click", () => cancel.closest("dialog")?.close());
}
window.addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", () => wake());
showView();
void watch();
