// Asks the worker for the colours of code, so that the page never waits for them. The worker starts with the first.

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
  const url = new URL("highlight_worker.js", import.meta.url).href;
  // Where the browser enforces it, this is the only string of all that the page may run as a script.
  const policy = globalThis.trustedTypes?.createPolicy("highlighter", { createScriptURL: () => url });
  const started = new Worker(policy ? policy.createScriptURL("") : url, { type: "module" });
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
