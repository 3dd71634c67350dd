// Times of views about machines, files and jobs, as people read them.

import { language, tr } from "../../translate.js";

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
