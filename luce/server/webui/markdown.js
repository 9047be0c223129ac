/** Markdown of a reply as elements. What the model writes as HTML is shown as text. */

import { element } from "./dom.js";
import DOMPurify from "./vendor/dompurify/purify.es.mjs";
import { Marked } from "./vendor/marked/marked.esm.js";

/** The elements and attributes that Markdown needs. No style, no image: one of another server would tell it of the reply. */
const CLEAN = {
  ALLOWED_TAGS: [
    ..."a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong".split(" "),
    ..."table tbody td th thead tr ul".split(" "),
  ],
  ALLOWED_ATTR: ["align", "href", "rel", "start", "target", "title"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  // Their values are no addresses.
  ADD_URI_SAFE_ATTR: ["align", "rel", "start", "target"],
  RETURN_DOM_FRAGMENT: true,
};

const markdown = new Marked({
  gfm: true,
  renderer: {
    html: (/** @type {any} */ { text, block }) => {
      if (/^<br\s*\/?>$/i.test(text.trim())) return "<br>";
      return block ? `<p>${escaped(text)}</p>` : escaped(text);
    },
    checkbox: (/** @type {any} */ { checked }) => (checked ? "☑ " : "☐ "),
    image: (/** @type {any} */ { href, text }) => anchor(href, escaped(text || href)),
    link(/** @type {any} */ { href, tokens }) {
      return anchor(href, /** @type {any} */ (this).parser.parseInline(tokens));
    },
  },
});

/** @type {WeakMap<Element, string>} the source of each block that is shown */
const sources = new WeakMap();

/**
 * Shows a text that may have grown since the last call: blocks that are the same stay as they are.
 * @param {Element} target
 * @param {string} text
 */
export function render(target, text) {
  const blocks = markdown.lexer(text).filter(({ type }) => type !== "space");
  blocks.forEach((block, index) => {
    const shown = target.children[index];
    if (shown && sources.get(shown) === block.raw) return;
    const made = element("div", {}, DOMPurify.sanitize(markdown.parser([block]), CLEAN));
    sources.set(made, block.raw);
    if (shown) shown.replaceWith(made);
    else target.append(made);
  });
  while (target.children.length > blocks.length) target.lastElementChild?.remove();
}

/**
 * A link that tells its target nothing of this page.
 * @param {string} href
 * @param {string} content HTML
 */
function anchor(href, content) {
  return `<a href="${escaped(href)}" target="_blank" rel="noopener noreferrer">${content}</a>`;
}

/** @param {string} text */
function escaped(text) {
  return text.replace(/[&<>"]/g, (character) => `&#${character.charCodeAt(0)};`);
}
