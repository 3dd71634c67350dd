// Numbers of the time line as text.

import { formatNumber } from "../../translate.js";

const DURATIONS = [[1e6, "s"], [1e3, "ms"], [0, "µs"]];
const PREFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [0, ""]];

/** 15239.6 microseconds -> "15.2 ms" */
export function duration(us) {
  const [unit, name] = DURATIONS.find(([least]) => us >= least) ?? DURATIONS.at(-1);
  return `${short(us / (unit || 1))} ${name}`;
}

/** 20480, "B" -> "20.5 kB" */
export function quantity(value, unit) {
  const [least, prefix] = PREFIXES.find(([least]) => value >= least);
  return `${short(value / (least || 1))} ${prefix}${unit}`;
}

/** 0.1234 -> "12.3%" */
export const percent = (share) => `${formatNumber(100 * share, 1)}%`;

/** Three digits at least: 15239 -> "15,239", 15.2396 -> "15.2", 1.52396 -> "1.52" */
function short(value) {
  return formatNumber(value, value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2);
}
