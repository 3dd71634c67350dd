// Files that are attached to a message: their text is read, or they are refused with a reason and a remedy.

import { formatNumber, tr } from "./translate.js";

export const MAX_FILE_BYTES = 1024 * 1024; // of text
const MAX_TOTAL_BYTES = 3 * 1024 * 1024; // the server takes requests of up to 4 MiB
const HEAD_BYTES = 4096; // that tell text from other files
const UTF_16 = { "255,254": "utf-16le", "254,255": "utf-16be" }; // by their first bytes
const OFFICE = /officedocument|opendocument|msword|ms-excel|ms-powerpoint|epub/;
const ARCHIVE = /zip|x-tar|gzip|7z|rar|x-xz|bzip|zstd/;

/** Read a file; returns { name, text }. `name` may be its path in a folder, `others` are the files that are attached.
 *  `onProgress({ page, numPages })` is called for PDFs. Throws an Error whose message is for the user, and AbortError. */
export async function readFile(file, { name = file.name, others = [], ...options }) {
  const text = await textOf(file, options);
  const size = byteCount(text);
  if (size > MAX_FILE_BYTES) throw new Error(tooLarge(file.name, size));
  const total = others.reduce((sum, it) => sum + byteCount(it.text), size);
  if (total > MAX_TOTAL_BYTES) {
    throw new Error(tr("{file} is one too many: all files of a message may have up to {limit}.", { file: name, limit: sizeText(MAX_TOTAL_BYTES) }));
  }
  return { name, text };
}

async function textOf(file, options) {
  const head = new Uint8Array(await file.slice(0, HEAD_BYTES).arrayBuffer());
  if (isPdf(head)) {
    const { MAX_PDF_BYTES, readPdfText } = await import("./pdf/pdf_text.js");
    if (file.size > MAX_PDF_BYTES) throw new Error(tooLarge(file.name, file.size, MAX_PDF_BYTES));
    return readPdfText(file, options);
  }
  const encoding = UTF_16[head.slice(0, 2).join()] ?? "utf-8";
  if (encoding === "utf-8" && head.includes(0)) throw new Error(refusalOf(file));
  if (file.size > 2 * MAX_FILE_BYTES) throw new Error(tooLarge(file.name, file.size)); // UTF-16 takes twice the room
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {
    // Other bytes: see below.
  }
  throw new Error(refusalOf(file));
}

function isPdf(head) {
  return new TextDecoder("latin1").decode(head.slice(0, 1024)).includes("%PDF-");
}

function tooLarge(name, size, limit = MAX_FILE_BYTES) {
  return tr("{file} is {size}; files may have up to {limit}. Attach the part that matters.", { file: name, size: sizeText(size), limit: sizeText(limit) });
}

/** Why a file that is no text is refused. Its type is what the browser takes its name for. */
function refusalOf({ name, type }) {
  const file = { file: name };
  if (type.startsWith("image/")) return tr("{file} is an image; this model reads text only.", file);
  if (type.startsWith("audio/")) return tr("{file} is a sound recording; this model reads text only.", file);
  if (type.startsWith("video/")) return tr("{file} is a video; this model reads text only.", file);
  if (OFFICE.test(type)) return tr("{file} is not a text file. Save it as PDF first.", file);
  if (ARCHIVE.test(type)) return tr("{file} is an archive. Attach the files in it.", file);
  return tr("{file} is not a text file. Save it as text (UTF-8) first.", file);
}

function byteCount(text) {
  return new Blob([text]).size;
}

export function fileSize(text) {
  return sizeText(byteCount(text));
}

function sizeText(bytes) {
  if (bytes < 1024) return tr(bytes === 1 ? "{count} byte" : "{count} bytes", { count: bytes });
  return bytes < 1024 ** 2 ? `${formatNumber(bytes / 1024, 0)} KiB` : `${formatNumber(bytes / 1024 ** 2, 1)} MiB`;
}
