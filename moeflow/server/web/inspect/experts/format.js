// Numbers as the user's language writes them.

import { language } from "../../translate.js";

export const count = (value) => value.toLocaleString(language());

export const percent = (share) =>
  share.toLocaleString(language(), { style: "percent", maximumFractionDigits: share < 0.1 ? 1 : 0 });

/** A ratio with at most three digits: "1.25", "12.5". */
export const ratio = (value) =>
  value.toLocaleString(language(), { minimumFractionDigits: value < 10 ? 1 : 0, maximumFractionDigits: value < 10 ? 2 : 0 });
