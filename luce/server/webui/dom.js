/** Elements of the page. No text becomes markup here. */

/**
 * An element of index.html.
 * @template {HTMLElement} T
 * @param {string} id
 * @param {new () => T} kind
 * @returns {T}
 */
export function find(id, kind) {
  const found = document.getElementById(id);
  if (!(found instanceof kind)) throw new Error(`#${id} is no ${kind.name}`);
  return found;
}

/**
 * A new element with attributes and children; an attribute that is false is left out.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, string | number | boolean>} [attributes]
 * @param {...(Node | string)} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false) made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children);
  return made;
}

/**
 * A button that calls a function.
 * @param {string} text
 * @param {() => void} action
 */
export function button(text, action) {
  const made = element("button", { type: "button" }, text);
  made.addEventListener("click", action);
  return made;
}

/**
 * Sets a text, and leaves the element alone if it has it: selections stay.
 * @param {Element} target
 * @param {string} text
 */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}
