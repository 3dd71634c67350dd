// Numbers of views about machines, files and jobs, as people read them.

import { language, tr } from "../../translate.js";

const UNITS = [
  [2 ** 40, "TiB"],
  [2 ** 30, "GiB"],
  [2 ** 20, "MiB"],
  [2 ** 10, "KiB"],
];

/** 3221225472 -> "3.0 GiB" */
export function formatSize(bytes) {
  const [unit, name] = UNITS.find(([least]) => bytes >= least) ?? [1, "B"];
  return `${formatFixed(bytes / unit, unit === 1 ? 0 : 1)} ${name}`;
}

/** A number with this many digits behind the point. */
export function formatFixed(value, digits) {
  return value.toLocaleString(language(), { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** A share of 1 as percents. */
export function formatShare(share) {
  return share.toLocaleString(language(), { style: "percent" });
}

/** Seconds as a time that is left: "40 s", "12 min", "3 h 5 min". */
export function formatDuration(seconds) {
  if (seconds < 100) return tr("{seconds} s", { seconds: Math.ceil(seconds) });
  const minutes = Math.ceil(seconds / 60);
  if (minutes < 100) return tr("{minutes} min", { minutes });
  return tr("{hours} h {minutes} min", { hours: Math.floor(minutes / 60), minutes: minutes % 60 });
}

/** Seconds since the epoch as a date and a time. */
export function formatTime(timeS) {
  return new Date(timeS * 1000).toLocaleString(language(), { dateStyle: "short", timeStyle: "short" });
}
