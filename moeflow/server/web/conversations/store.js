// All conversations, kept in this browser: what the list shows of each is apart from its messages, so that the list
// is there at once. Emits "change" when another tab has changed one (its id in `detail`) or when a save has failed.

import { Stored } from "../storage.js";
import { Conversation } from "./conversation.js";
import { openTables } from "./tables.js";

export class ConversationStore extends EventTarget {
  constructor() {
    super();
    this.tables = openTables("moeflow", ["heads", "records"]);
    this.unsaved = new Stored("sessionStorage", "unsaved");
    this.channel = new BroadcastChannel("moeflow.conversations");
    this.channel.addEventListener("message", ({ data }) => this.dispatchEvent(new CustomEvent("change", { detail: data })));
    this.error = null; // why the last save failed
  }

  /** Id, name and time of all conversations, the latest first. */
  async heads() {
    const heads = await (await this.tables).all("heads");
    return heads.sort((a, b) => b.updatedAt - a.updatedAt);
  }

  /** Return a conversation, or null. */
  async load(id) {
    const record = await (await this.tables).get("records", id);
    return record ? new Conversation(record) : null;
  }

  async save(conversation) {
    if (conversation.isEmpty) return;
    conversation.savedAt = Date.now();
    const { id, name, updatedAt } = conversation;
    await this.write(id, { heads: { id, name, updatedAt }, records: conversation.record() });
  }

  async remove(id) {
    await this.write(id, { heads: undefined, records: undefined });
  }

  async clear() {
    this.unsaved.remove();
    await (await this.tables).clear();
    this.channel.postMessage(null);
  }

  /** Heads of the conversations whose name or messages contain all words. */
  async search(text) {
    const words = text.toLocaleLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return this.heads();
    const records = await (await this.tables).all("records");
    const found = new Set(records.filter((record) => hasAll(record, words)).map((record) => record.id));
    return (await this.heads()).filter((head) => found.has(head.id));
  }

  async all() {
    return (await (await this.tables).all("records")).map((record) => new Conversation(record));
  }

  async write(id, values) {
    try {
      await (await this.tables).set(id, values);
      this.error = null;
    } catch (error) {
      this.error = `This browser could not keep the conversation (${error?.name ?? "unknown reason"}); export it before you close the page.`;
      this.dispatchEvent(new CustomEvent("change", { detail: null }));
    }
    this.channel.postMessage(id);
  }

  /** Keep a conversation while the page goes away: no time is left then for what takes more than this very moment. */
  saveLeaving(conversation) {
    if (conversation.isEmpty) this.unsaved.remove();
    else this.unsaved.write(conversation.record());
    this.save(conversation);
  }

  /** Save what `saveLeaving` kept, unless it was saved after all, or is newer in another tab. */
  async recover() {
    const record = this.unsaved.read();
    const kept = record && (await this.load(record.id));
    if (record && !(kept?.savedAt > record.savedAt)) await this.save(new Conversation(record));
    this.unsaved.remove();
  }
}

function hasAll({ title, messages }, words) {
  const text = [title, ...messages.map((message) => message.content)].join("\n").toLocaleLowerCase();
  return words.every((word) => text.includes(word));
}
