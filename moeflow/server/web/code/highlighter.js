// Asks the worker for the colours of code, so that the page never waits for them. The worker starts with the first.

import { startWorker } from "../workers.js";

let worker = null;
let numAsked = 0;
const waiting = new Map(); // what to call with an answer, by its number

/** Return `lines` of `code`, each as JSON of [kind, text, kind, text, …], where kind "" is plain, and how long it took,
 *  `tookMs`. Lines are null where code cannot be coloured. */
export function highlight(code, language) {
  worker ??= start();
  numAsked += 1;
  worker.postMessage({ number: numAsked, code, language });
  return new Promise((resolve) => waiting.set(numAsked, resolve));
}

function start() {
  const started = startWorker("highlighter");
  started.addEventListener("message", ({ data }) => {
    waiting.get(data.number)?.(data);
    waiting.delete(data.number);
  });
  started.addEventListener("error", () => {
    for (const resolve of waiting.values()) resolve({ lines: null, tookMs: 0 });
    waiting.clear();
  });
  return started;
}
