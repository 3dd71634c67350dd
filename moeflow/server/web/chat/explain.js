// Says why an answer ended early, and what would help.

import { ApiError } from "../api.js";

export function explain(error) {
  if (!(error instanceof ApiError)) {
    console.error(error);
    return "The page itself failed; the browser’s console says where.";
  }
  if (error.status === 401) return "The server asks for an API key; enter it below.";
  if (error.status === 429) {
    const when = error.retryAfterS ? `in ${Math.ceil(error.retryAfterS)} s` : "later";
    return `The server is busy; try again ${when}.\n${error.message}`;
  }
  if (error.code === "context_length_exceeded") return `${error.message}\nA shorter message or fewer files may fit.`;
  return error.message;
}
