// Starts the page's workers. Where the browser enforces trusted types, no other text can become a script.

const PATHS = { highlighter: "code/highlight_worker.js", pdf: "pdf/pdf_worker.js" };
const urlOf = (name) => new URL(PATHS[name], import.meta.url).href;
const policy = globalThis.trustedTypes?.createPolicy("workers", { createScriptURL: urlOf });

/** Start a worker by its name. */
export function startWorker(name) {
  return new Worker(policy ? policy.createScriptURL(name) : urlOf(name), { type: "module" });
}
