// What can be done with conversations as wholes: open, begin, rename, delete, put back, export and import.
// The address says which one is open, so that reloads, bookmarks and the browser's way back do what they should.

import { promptText } from "../chat/messages.js";
import { saveText } from "../save_file.js";
import { Conversation } from "./conversation.js";
import { readJson, writeJson } from "./json_file.js";
import { readMarkdown, writeMarkdown } from "./markdown_file.js";

export class Library {
  /** `onShown()` is called when another conversation is shown, or the list may be another. */
  constructor(chat, store, onShown) {
    Object.assign(this, { chat, store, onShown });
  }

  get current() {
    return this.chat.conversation;
  }

  /** Show what the address says, or a new conversation. */
  async openAddressed() {
    const id = location.hash.slice(1);
    if (id === this.current.id) return;
    const kept = id ? await this.store.load(id) : null;
    if (location.hash.slice(1) !== id) return; // it says something else by now
    if (kept || !this.current.isEmpty) this.chat.open(kept ?? new Conversation());
    this.onShown();
  }

  /** Put the id of the open conversation into the address, once there is something to come back to. */
  address() {
    const hash = this.current.isEmpty ? "" : `#${this.current.id}`;
    if (location.hash !== hash) history.pushState(null, "", hash || location.pathname + location.search);
  }

  open(conversation) {
    this.chat.open(conversation);
    this.address();
    this.onShown();
  }

  begin() {
    this.open(new Conversation());
  }

  /** Another tab has changed a conversation: show it as it is now, if it is the open one and at rest in both. */
  async takeOver(id) {
    if (id === this.current.id && !this.chat.running) {
      const changed = await this.store.load(id);
      if (changed && !changed.wasRunning && changed.savedAt !== this.current.savedAt) this.chat.open(changed);
    }
    this.onShown();
  }

  async rename(title) {
    this.current.title = title;
    await this.store.save(this.current);
  }

  async remove(id) {
    if (id === this.current.id) this.begin();
    await this.store.remove(id);
    this.onShown();
  }

  async restore(conversation) {
    await this.store.save(conversation);
    this.open(conversation);
  }

  async export(kind) {
    const { current } = this;
    if (kind === "markdown") {
      const messages = current.path().map((it) => ({ role: it.role, content: it.role === "user" ? promptText(it) : it.content }));
      saveText(`${fileName(current.name)}.md`, "text/markdown", writeMarkdown(current.name, messages));
      return;
    }
    const all = kind === "all" ? await this.store.all() : [current];
    saveText(`${kind === "all" ? "conversations" : fileName(current.name)}.json`, "application/json", writeJson(all.map((it) => it.record())));
  }

  /** Import files and open the last conversation of them. Throws an Error that says which file could not be read. */
  async import(files) {
    let last = null;
    let count = 0;
    for (const file of files) {
      for (const conversation of await readFile(file)) {
        if (conversation.isEmpty) continue;
        await this.store.save(conversation);
        last = conversation;
        count += 1;
      }
    }
    if (last) this.open(last);
    return count;
  }
}

async function readFile(file) {
  const text = await file.text();
  try {
    const records = /\.md$/i.test(file.name) ? [readMarkdown(text)] : readJson(text);
    return records.map((record) => new Conversation(record));
  } catch (error) {
    throw new Error(`${file.name} could not be imported: ${error.message}.`);
  }
}

function fileName(name) {
  return name.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").toLowerCase() || "conversation";
}
