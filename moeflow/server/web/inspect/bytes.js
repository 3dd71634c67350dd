// Numbers of bytes, as people read them.

import { language } from "../translate.js";

const UNITS = [
  [2 ** 40, "TiB"],
  [2 ** 30, "GiB"],
  [2 ** 20, "MiB"],
  [2 ** 10, "KiB"],
];

/** 3221225472 -> "3.00 GiB" */
export function formatBytes(bytes) {
  const found = UNITS.find(([least]) => bytes >= least);
  if (!found) return `${Math.round(bytes)} B`;
  const [unit, name] = found;
  return `${(bytes / unit).toLocaleString(language(), { maximumSignificantDigits: 3, minimumSignificantDigits: 3, useGrouping: false })} ${name}`;
}
