// What a file says of how an answer was asked for and measured: only what the page knows, as what it takes it for.

import { changedValues, DEFAULTS, PROBLEMS } from "../presets/values.js";
import { textOf } from "./foreign_files.js";

/** The `asked` of an answer, or null where it is not known. See `newAnswer`. */
export function checkedAsked(asked) {
  if (!asked || typeof asked !== "object") return null;
  const values = Object.entries({ ...asked.values }).filter(([name, value]) => isValue(name, value));
  const known = { ...DEFAULTS, ...Object.fromEntries(values) };
  return { model: textOf(asked.model), preset: textOf(asked.preset), values: changedValues(known), isOwn: asked.isOwn === true };
}

/** The measurements of an answer, or null where one is not a number. See answer.js. */
export function checkedMeasured(measured) {
  const { tokens, isExact, firstTokenS, totalS, tokensPerS } = measured ?? {};
  if (![tokens, firstTokenS, totalS].every(Number.isFinite)) return null;
  return { tokens, isExact: isExact === true, firstTokenS, totalS, tokensPerS: Number.isFinite(tokensPerS) ? tokensPerS : null };
}

function isValue(name, value) {
  if (!(name in DEFAULTS)) return false;
  const byDefault = DEFAULTS[name];
  if (typeof byDefault === "string") return typeof value === "string" && !PROBLEMS[name]?.(value);
  return typeof byDefault === "boolean" ? typeof value === "boolean" : value === null || Number.isFinite(value);
}
