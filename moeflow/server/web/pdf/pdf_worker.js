// Reads the text of a PDF with PDF.js, all of it in this worker: a file that takes too long ends with it.
// Takes { bytes, maxPages, port }. Sends to the port { page, numPages } after each page, and in the end { pages } with the text of each, or
// { problem }: "password", "damaged", "pages" (too many, `numPages`), or "characters" (it needs the table `name`).

import "../vendor/pdfjs/pdf.worker.js"; // before the next, which otherwise would start a worker for it
import { getDocument, VerbosityLevel } from "../vendor/pdfjs/pdf.js";

const missing = new Set(); // names of tables of characters

/** In the place of the loader of tables that are no part of a PDF, such as those of older Chinese and Japanese fonts. */
class NoTables {
  async fetch({ kind, filename }) {
    if (kind === "cMapUrl") missing.add(filename.replace(/\.bcmap$/, ""));
    throw new Error(`${filename} is not here`);
  }
}

// PDF.js also listens here and speaks, hence the port.
addEventListener("message", async ({ data: { bytes, maxPages, port } }) => {
  try {
    port.postMessage(await read(bytes, maxPages, port));
  } catch (error) {
    port.postMessage({ problem: error?.name === "PasswordException" ? "password" : "damaged" });
  }
});

async function read(bytes, maxPages, port) {
  const pdf = await getDocument({
    data: bytes,
    BinaryDataFactory: NoTables,
    useWorkerFetch: false,
    disableFontFace: true, // nothing is drawn
    useSystemFonts: false,
    verbosity: VerbosityLevel.ERRORS,
  }).promise;
  const { numPages } = pdf;
  if (numPages > maxPages) return { problem: "pages", numPages };
  const pages = [];
  for (let number = 1; number <= numPages; number += 1) {
    pages.push(await textOf(await pdf.getPage(number)));
    port.postMessage({ page: number, numPages });
  }
  return missing.size ? { problem: "characters", name: [...missing].join(", ") } : { pages };
}

async function textOf(page) {
  const { items } = await page.getTextContent();
  const text = items.map(({ str, hasEOL }) => `${str}${hasEOL ? "\n" : ""}`).join("");
  page.cleanup();
  return text.replace(/[ \t]+$/gm, "").trim();
}
