// Text files that are attached to a message: read, or refused with a reason and a remedy.

export const MAX_FILE_BYTES = 1024 * 1024; // the server takes requests of up to 4 MiB

/** Read a file as text; returns { name, text }. Throws an Error whose message is for the user. */
export async function readTextFile(file) {
  if (file.size > MAX_FILE_BYTES) {
    throw new Error(`${file.name} is ${sizeText(file.size)}; files may have up to ${sizeText(MAX_FILE_BYTES)}. Attach the part that matters.`);
  }
  const bytes = await file.arrayBuffer();
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    text = "\0";
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not a text file. Save it as text (UTF-8) first.`);
  return { name: file.name, text };
}

export function fileSize(text) {
  return sizeText(new Blob([text]).size);
}

function sizeText(bytes) {
  if (bytes < 1024) return `${bytes} bytes`;
  return bytes < 1024 ** 2 ? `${(bytes / 1024).toFixed(0)} KiB` : `${(bytes / 1024 ** 2).toFixed(1)} MiB`;
}
