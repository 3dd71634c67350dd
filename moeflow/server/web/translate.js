// The language of the page. English texts are the keys; languages.js has the others, and is loaded only if one is used.

import { Stored } from "./storage.js";

const ENGLISH = "en";
const ATTRIBUTES = ["aria-label", "placeholder", "title"];
const stored = new Stored("localStorage", "language");
let texts = {}; // from English to the language of the page
let code = ENGLISH;
const formats = new Map(); // of numbers, by digits

/** The code of the page's language, such as "de". */
export const language = () => code;

/** A text in the page's language. `values` replace names in braces: tr("{count} tokens", { count: 3 }). */
export function tr(text, values = {}) {
  return (texts[text] ?? text).replaceAll(/\{(\w+)\}/g, (name, key) => values[key] ?? name);
}

/** Mark a text that `tr` gets later from a variable, so that scripts/page_texts.py finds it. */
export const textKey = (text) => text;

/** A number as the page's language writes it, with this many digits behind the point; without `digits` as many as it has, at most 3. */
export function formatNumber(value, digits) {
  const options = digits === undefined ? {} : { minimumFractionDigits: digits, maximumFractionDigits: digits };
  if (!formats.has(digits)) formats.set(digits, new Intl.NumberFormat(code, options));
  return formats.get(digits).format(value);
}

/** A share of 1 as percents: 0.125 -> "13%". */
export function formatPercent(share, digits = 0) {
  return share.toLocaleString(code, { style: "percent", minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** Load the language that the user has chosen, or that the browser prefers, and translate the document. */
export async function useLanguage() {
  const wanted = stored.read() ?? navigator.language.split("-")[0];
  try {
    if (wanted !== ENGLISH) await load(wanted);
  } catch {
    // It could not be loaded: the page stays in English.
  }
  document.documentElement.classList.remove("is-translating");
}

async function load(wanted) {
  const { LANGUAGES } = await import("./languages.js");
  if (!LANGUAGES[wanted]) return;
  texts = LANGUAGES[wanted].texts;
  code = document.documentElement.lang = wanted;
  translateTree(document.body);
  for (const template of document.querySelectorAll("template")) translateTree(template.content);
}

/** Keep the choice of a language; "" is the browser's. The page has to be loaded again. */
export function chooseLanguage(chosen) {
  if (chosen) stored.write(chosen);
  else stored.remove();
}

/** The chosen language; "" is the browser's. */
export const chosenLanguage = () => stored.read() ?? "";

function translateTree(root) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT | NodeFilter.SHOW_ELEMENT);
  while (walker.nextNode()) {
    const { currentNode: node } = walker;
    if (node.nodeType === Node.TEXT_NODE) translateText(node);
    else for (const name of ATTRIBUTES) if (node.hasAttribute(name)) node.setAttribute(name, tr(node.getAttribute(name)));
  }
}

function translateText(node) {
  const text = node.data.trim();
  if (text && texts[text]) node.data = node.data.replace(text, () => texts[text]);
}
