// All conversations, kept in this browser: what the list shows of each is apart from its messages, so that the list
// is there at once. Emits "change" when another tab has changed some (their ids in `detail`) or when a save has failed.
// Several tabs may work on one conversation: saving merges it with the stored one. A removed conversation stays
// removed, also if a tab still uses it, unless it is restored: a mark stays in the list.

import { Stored } from "../storage.js";
import { tr } from "../translate.js";
import { Conversation } from "./conversation.js";
import { openTables } from "./tables.js";

const NOTHING = { heads: undefined, records: undefined };
const MARKS_STAY_MS = 30 * 24 * 3600 * 1000; // longer than tabs stay open that know of nothing

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
    return heads.filter((head) => !head.removedAt).sort((a, b) => b.updatedAt - a.updatedAt);
  }

  /** Return a conversation, or null. One that could not be recovered is only in what `saveLeaving` kept. */
  async load(id) {
    const unsaved = this.unsaved.read();
    const record = (await (await this.tables).get("records", id)) ?? (unsaved?.id === id ? unsaved : null);
    return record ? new Conversation(record) : null;
  }

  /** Save a conversation, which takes in what other tabs have added. Return whether it is kept. */
  async save(conversation, event = "saved") {
    const { id, isEmpty } = conversation;
    if (isEmpty || this.removed.has(id)) return false;
    let record;
    const merge = ({ heads: head, records: kept }) => {
      if (head?.removedAt && event !== "restored") this.markRemoved([id]); // this tab had not heard of it
      if (this.removed.has(id)) return { heads: head };
      if (kept) conversation.absorb(new Conversation(kept));
      const { name, updatedAt } = conversation;
      record = conversation.record();
      return { heads: { id, name, updatedAt }, records: record };
    };
    if (!(await this.write([id], event, (tables) => tables.update(id, merge)))) return false;
    if (record) conversation.noteKept(record);
    if (this.removed.has(id)) this.dispatchEvent(new CustomEvent("change", { detail: [id] }));
    return !this.removed.has(id);
  }

  remove(id) {
    return this.removeAll([id]);
  }

  removeAll(ids) {
    this.markRemoved(ids);
    const mark = (id) => ({ heads: { id, removedAt: Date.now() } });
    return this.write(ids, "removed", async (tables) => {
      // If not even a mark fits, the conversation is removed all the same.
      const remove = (id) => tables.update(id, () => mark(id)).catch(() => tables.update(id, () => NOTHING));
      await Promise.all(ids.map(remove));
    });
  }

  /** Save a conversation that may have been removed. Return whether it is kept. */
  restore(conversation) {
    this.removed.delete(conversation.id);
    return this.save(conversation, "restored");
  }

  /** Remove all conversations, and that with the id `open`, which may not be kept yet. */
  async clear(open) {
    this.unsaved.remove();
    this.markRemoved([open]); // at once: its answer is about to be stopped, and would be saved
    await this.removeAll([open, ...(await this.heads()).map((head) => head.id)]);
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

  /** Have `action` change the tables and tell other tabs. Return whether that succeeded; `error` says why not. */
  async write(ids, event, action) {
    try {
      await action(await this.tables);
      this.error = null;
    } catch (error) {
      this.error = tr("This browser could not keep the conversation ({reason}); export it before you close the page.", { reason: error?.name ?? tr("unknown reason") });
      this.dispatchEvent(new CustomEvent("change", { detail: [] }));
    }
    this.tell(event, ids);
    return !this.error;
  }

  /** Keep a conversation while the page goes away: no time is left then for what takes more than this very moment. */
  saveLeaving(conversation) {
    if (conversation.isEmpty || this.removed.has(conversation.id)) return;
    this.unsaved.write(conversation.record());
    this.save(conversation);
  }

  /** Save what `saveLeaving` kept. */
  async recover() {
    const record = this.unsaved.read();
    if (record) await this.save(new Conversation(record));
    if (!this.error) this.unsaved.remove(); // or else it is the only copy
  }

  /** Drop marks of conversations removed so long ago that no tab can still have them open. */
  async forgetRemoved() {
    const tables = await this.tables;
    const isOld = ({ removedAt }) => removedAt < Date.now() - MARKS_STAY_MS;
    for (const { id } of (await tables.all("heads")).filter(isOld)) await tables.update(id, () => NOTHING);
  }
}

function hasAll({ title, messages }, words) {
  const text = [title, ...messages.map((message) => message.content)].join("\n").toLocaleLowerCase();
  return words.every((word) => text.includes(word));
}
