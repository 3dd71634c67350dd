// Says why an answer ended early, and what would help.

import { ApiError } from "../api.js";
import { tr } from "../translate.js";

export function explain(error) {
  if (!(error instanceof ApiError)) {
    console.error(error);
    return tr("The page itself failed; the browser’s console says where.");
  }
  if (error.status === 401) return tr("The server asks for an API key; enter it below.");
  if (error.status === 429) {
    const seconds = Math.ceil(error.retryAfterS);
    const advice = seconds ? tr("The server is busy; try again in {seconds} s.", { seconds }) : tr("The server is busy; try again later.");
    return `${advice}\n${error.message}`;
  }
  if (error.code === "context_length_exceeded") return `${error.message}\n${tr("A shorter message or fewer files may fit.")}`;
  return error.message;
}
