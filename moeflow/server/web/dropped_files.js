// Dropped and pasted files: { file, name }. The name of a file in a folder is its path.

import { tr } from "./translate.js";

const MAX_FILES = 100; // of a folder
const LEFT_OUT = /^(?:\.|node_modules$|__pycache__$)/; // names of hidden files, and of folders of other people's files

/** Take what an event brings, at once: its data is gone after it. Returns a function that reads folders. */
export function takeDropped({ items, files }) {
  const entries = [...items].filter(({ kind }) => kind === "file").map((item) => item.webkitGetAsEntry?.());
  if (!entries.length || entries.includes(undefined) || entries.includes(null)) {
    const found = [...files].map((file) => ({ file, name: file.name }));
    return async () => found;
  }
  return async () => (await Promise.all(entries.map((entry) => filesOf(entry)))).flat();
}

async function filesOf(entry) {
  if (entry.isFile) return [{ file: await fileOf(entry), name: entry.name }];
  const found = [];
  await walk(entry, found, entry.name);
  return found.sort((a, b) => a.name.localeCompare(b.name));
}

async function walk(folder, found, top) {
  for (const entry of await childrenOf(folder)) {
    if (LEFT_OUT.test(entry.name)) continue;
    if (entry.isDirectory) await walk(entry, found, top);
    else found.push({ file: await fileOf(entry), name: entry.fullPath.replace(/^\//, "") });
    if (found.length > MAX_FILES) throw new Error(tr("The folder {name} has more than {limit} files. Attach the important ones.", { name: top, limit: MAX_FILES }));
  }
}

async function childrenOf(folder) {
  const reader = folder.createReader();
  const all = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject)); // at most 100 at once
    if (!some.length) return all;
    all.push(...some);
  }
}

function fileOf(entry) {
  return new Promise((resolve, reject) => entry.file(resolve, reject));
}
