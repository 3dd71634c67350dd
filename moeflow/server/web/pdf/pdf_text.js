// The text of a PDF, page by page, or the reason why there is none.

import { tr } from "../translate.js";
import { startWorker } from "../workers.js";

export const MAX_PDF_BYTES = 64 * 1024 * 1024;
const MAX_PAGES = 1000;
const MAX_PAUSE_MS = 30_000; // between two pages

/** Read a PDF; returns its text, with the number of each page before it. `onProgress({ page, numPages })` is called
 *  after each page. Throws an Error whose message is for the user, and AbortError. */
export async function readPdfText(file, { onProgress, signal }) {
  const { pages, problem, ...details } = await ask(await file.arrayBuffer(), { onProgress, signal });
  if (problem) throw new Error(reasonOf(problem, { file: file.name, ...details }));
  if (!pages.some(Boolean)) {
    throw new Error(tr("{file} has no text: its pages are pictures. Have them read (OCR) first.", { file: file.name }));
  }
  return pages.map((text, i) => `[${tr("Page {number}", { number: i + 1 })}]\n${text || tr("(no text on this page)")}`).join("\n\n");
}

function ask(buffer, { onProgress, signal }) {
  const worker = startWorker("pdf");
  const { port1: ours, port2: port } = new MessageChannel();
  let timer;
  const answer = new Promise((resolve, reject) => {
    const wait = () => {
      clearTimeout(timer);
      timer = setTimeout(() => resolve({ problem: "slow" }), MAX_PAUSE_MS);
    };
    ours.addEventListener("message", ({ data }) => {
      if (!data.page) return resolve(data);
      wait();
      onProgress(data);
    });
    worker.addEventListener("error", () => resolve({ problem: "damaged" }));
    signal.addEventListener("abort", () => reject(signal.reason));
    wait();
    ours.start();
    worker.postMessage({ bytes: new Uint8Array(buffer), maxPages: MAX_PAGES, port }, [buffer, port]);
  });
  return answer.finally(() => {
    clearTimeout(timer);
    worker.terminate();
  });
}

function reasonOf(problem, details) {
  switch (problem) {
    case "password":
      return tr("{file} is protected by a password. Save it without one first.", details);
    case "pages":
      return tr("{file} has {numPages} pages; up to {limit} are read. Attach the part that matters.", { ...details, limit: MAX_PAGES });
    case "characters":
      return tr("{file} needs a table of characters that this page does not have ({name}). Save its text in another program first.", details);
    case "slow":
      return tr("{file} takes too long to read. Save its text in another program first.", details);
    default:
      return tr("{file} could not be read as a PDF; it may be damaged.", details);
  }
}
