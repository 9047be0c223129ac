/** JSON values in the browser's storage. */

/**
 * A value, null if there is none, or none that can be read.
 * @param {Storage} storage
 * @param {string} name
 * @returns {any}
 */
export function load(storage, name) {
  try {
    return JSON.parse(storage.getItem(name) ?? "null");
  } catch {
    return null;
  }
}

/**
 * Keeps a value. Returns whether it is kept: a storage may be full or turned off.
 * @param {Storage} storage
 * @param {string} name
 * @param {unknown} value
 */
export function save(storage, name, value) {
  try {
    storage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
