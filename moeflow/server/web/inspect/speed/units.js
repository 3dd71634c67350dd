// Numbers with their units, as the user's language writes them.

import { language, tr } from "../../translate.js";

const DECIMAL = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** A number with three digits that count: "0.0123", "41.2", "1,240". */
export function digits(value, count = 3) {
  const options = Math.abs(value) >= 10 ** (count - 1) ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: count };
  return value.toLocaleString(language(), options);
}

/** An amount in its largest decimal unit: decimal(33.3e9, "B/s") -> "33.3 GB/s" */
export function decimal(value, unit) {
  const [factor, prefix] = DECIMAL.find(([least]) => Math.abs(value) >= least) ?? [1, ""];
  return `${digits(value / factor)} ${prefix}${unit}`;
}

/** A deviation: "+4%". */
export function signedPercent(percents) {
  return (percents / 100).toLocaleString(language(), { style: "percent", maximumFractionDigits: 0, signDisplay: "exceptZero" });
}

export const factor = (value) => `×${value.toLocaleString(language(), { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`;

/** A time: "12.5 ms", "1.2 s". */
export function seconds(value) {
  return value < 1 ? `${digits(value * 1000)} ms` : `${digits(value)} s`;
}

/** How long ago something was: "5 s ago", "3 h ago", "4 days ago". */
export function ago(ageS) {
  if (ageS < 90) return tr("{count} s ago", { count: digits(Math.round(ageS)) });
  if (ageS < 5400) return tr("{count} min ago", { count: digits(Math.round(ageS / 60)) });
  if (ageS < 129600) return tr("{count} h ago", { count: digits(Math.round(ageS / 3600)) });
  return tr("{count} days ago", { count: digits(Math.round(ageS / 86400)) });
}
