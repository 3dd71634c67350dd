// Numbers as the user's language writes them.

import { language } from "../../translate.js";

export const count = (value) => value.toLocaleString(language());

export const percent = (share) =>
  share.toLocaleString(language(), { style: "percent", maximumFractionDigits: share < 0.1 ? 1 : 0 });

/** A ratio: "0.05", "1.25", "12.5", "125". */
export function ratio(value) {
  const digits = value < 10 ? 2 : value < 100 ? 1 : 0;
  return value.toLocaleString(language(), { minimumFractionDigits: digits, maximumFractionDigits: digits });
}
