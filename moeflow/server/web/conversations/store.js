// All conversations, kept in this browser: what the list shows of each is apart from its messages, so that the list
// is there at once. Emits "change" when another tab has changed some (their ids in `detail`) or when a save has failed.
// What was removed stays so, whoever still works on it, here or in another tab, unless it is restored.

import { Stored } from "../storage.js";
import { Conversation } from "./conversation.js";
import { openTables } from "./tables.js";

const NOTHING = { heads: undefined, records: undefined };

export class ConversationStore extends EventTarget {
  constructor() {
    super();
    this.tables = openTables("moeflow", ["heads", "records"]);
    this.unsaved = new Stored("sessionStorage", "unsaved");
    this.channel = new BroadcastChannel("moeflow.conversations");
    this.channel.addEventListener("message", ({ data }) => this.hear(data));
    this.removed = new Set(); // ids
    this.error = null; // why the last save failed
  }

  /** Id, name and time of all conversations, the latest first. */
  async heads() {
    const heads = await (await this.tables).all("heads");
    return heads.sort((a, b) => b.updatedAt - a.updatedAt);
  }

  /** Return a conversation, or null. One that could not be recovered is only in what `saveLeaving` kept. */
  async load(id) {
    const unsaved = this.unsaved.read();
    const record = (await (await this.tables).get("records", id)) ?? (unsaved?.id === id ? unsaved : null);
    return record ? new Conversation(record) : null;
  }

  /** Return whether it is kept. */
  async save(conversation, event = "saved") {
    if (conversation.isEmpty || this.removed.has(conversation.id)) return false;
    conversation.savedAt = Date.now();
    const { id, name, updatedAt } = conversation;
    return this.write(id, { heads: { id, name, updatedAt }, records: conversation.record() }, event);
  }

  async remove(id) {
    this.markRemoved([id]);
    await this.write(id, NOTHING, "removed");
  }

  /** Save a conversation that was removed. */
  async restore(conversation) {
    this.removed.delete(conversation.id);
    await this.save(conversation, "restored");
  }

  /** Remove all conversations, and that with the id `open`, which may not be kept yet. */
  async clear(open) {
    this.unsaved.remove();
    this.markRemoved([open]); // at once: its answer is about to be stopped, and would be saved
    this.markRemoved((await this.heads()).map((head) => head.id));
    await (await this.tables).clear();
    this.tell("removed", [...this.removed]);
  }

  markRemoved(ids) {
    for (const id of ids) {
      this.removed.add(id);
      if (this.unsaved.read()?.id === id) this.unsaved.remove();
    }
  }

  tell(event, ids) {
    this.channel.postMessage({ event, ids });
  }

  /** Another tab has told of its doings. */
  hear({ event, ids }) {
    if (event === "removed") this.markRemoved(ids);
    if (event === "restored") ids.forEach((id) => this.removed.delete(id));
    // A tab that saves what is removed had not heard of that yet.
    if (event === "saved") ids.filter((id) => this.removed.has(id)).forEach((id) => this.remove(id));
    this.dispatchEvent(new CustomEvent("change", { detail: ids }));
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

  /** Return whether that succeeded; `error` says why not. */
  async write(id, values, event) {
    try {
      await (await this.tables).set(id, values);
      this.error = null;
    } catch (error) {
      this.error = `This browser could not keep the conversation (${error?.name ?? "unknown reason"}); export it before you close the page.`;
      this.dispatchEvent(new CustomEvent("change", { detail: [] }));
    }
    this.tell(event, [id]);
    return !this.error;
  }

  /** Keep a conversation while the page goes away: no time is left then for what takes more than this very moment. */
  saveLeaving(conversation) {
    if (conversation.isEmpty || this.removed.has(conversation.id)) return;
    this.unsaved.write(conversation.record());
    this.save(conversation);
  }

  /** Save what `saveLeaving` kept, unless it was saved after all, or is newer in another tab. */
  async recover() {
    const record = this.unsaved.read();
    if (!record) return;
    const kept = await (await this.tables).get("records", record.id);
    const isNewer = !(kept?.savedAt > record.savedAt) && !this.removed.has(record.id);
    if (isNewer && !(await this.save(new Conversation(record)))) return; // it stays the only copy
    this.unsaved.remove();
  }
}

function hasAll({ title, messages }, words) {
  const text = [title, ...messages.map((message) => message.content)].join("\n").toLocaleLowerCase();
  return words.every((word) => text.includes(word));
}
