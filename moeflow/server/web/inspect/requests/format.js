// Numbers and names of requests, as the user's language writes them.

import { language, textKey, tr } from "../../translate.js";

const ENDPOINTS = {
  "/v1/chat/completions": textKey("Chat"),
  "/v1/completions": textKey("Completion"),
  "/v1/responses": textKey("Response"),
  "/v1/messages": textKey("Message"),
  "/v1/embeddings": textKey("Embedding"),
  "/api/chat": textKey("Ollama chat"),
  "/api/generate": textKey("Ollama generate"),
  "/api/embed": textKey("Ollama embed"),
  "/api/embeddings": textKey("Ollama embed"),
};

/** A duration: "12.3 s", "1.23 s", "45 ms", "0.3 ms". */
export function seconds(value) {
  const isShort = value < 0.1;
  const number = isShort ? value * 1000 : value;
  const digits = number >= 10 ? 1 : 2;
  return `${number.toLocaleString(language(), { maximumFractionDigits: isShort ? digits - 1 : digits })} ${isShort ? "ms" : "s"}`;
}

/** Tokens per second. */
export const speed = (value) => value.toLocaleString(language(), { maximumFractionDigits: value < 10 ? 2 : 1 });

/** A time of today as that, any other with its date. `unixS` is in seconds. */
export function clock(unixS) {
  const time = new Date(unixS * 1000);
  const isToday = time.toDateString() === new Date().toDateString();
  return isToday ? time.toLocaleTimeString(language()) : time.toLocaleString(language());
}

/** The kind of a request, for people. */
export function kindOf({ endpoint, is_batch: isBatch }) {
  const title = ENDPOINTS[endpoint] ?? endpoint;
  const name = tr(title);
  return isBatch ? tr("{name}, batch job", { name }) : name;
}

export function stateName(state) {
  return { running: tr("running"), done: tr("done"), stopped: tr("stopped"), failed: tr("failed"), refused: tr("refused") }[state];
}
