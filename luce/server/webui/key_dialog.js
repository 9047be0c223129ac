/** Asks for the API key of the server. */

import { find } from "./dom.js";
import { key, setKey } from "./server.js";

const dialog = find("key-dialog", HTMLDialogElement);
const input = find("key", HTMLInputElement);
const reason = find("key-reason", HTMLElement);
const opener = find("open-key", HTMLButtonElement);

/**
 * Opens the dialog. `refused`: the server wants a key, or another one; then the button that opens it is shown from now on.
 * @param {boolean} refused
 */
export function askForKey(refused) {
  if (dialog.open) return;
  opener.hidden = opener.hidden && !refused;
  reason.textContent = !refused ? "" : key() ? "The server refuses this key." : "This server needs a key.";
  input.value = key();
  dialog.returnValue = "";
  dialog.showModal();
}

/**
 * Calls a function when a key was given.
 * @param {() => void} changed
 */
export function onKey(changed) {
  opener.addEventListener("click", () => askForKey(false));
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "use") {
      setKey(input.value.trim());
      changed();
    }
    input.value = "";
  });
}
