// What can be done with conversations as wholes: open, begin, rename, delete, put back, export and import.
// The address names the open one, so that reloads, bookmarks and the browser's back button work.

import { promptText } from "../chat/messages.js";
import { saveText } from "../save_file.js";
import { tr } from "../translate.js";
import { Conversation } from "./conversation.js";

const STEP_MS = 1 / 1024; // exact in a number that is a time, and thousands of them are a moment

export class Library {
  /** `onShown()` is called when another conversation is shown, or the list may be another. */
  constructor(chat, store, onShown) {
    Object.assign(this, { chat, store, onShown });
    this.numSteps = 0; // of the user, to another conversation or on in the open one: where the last one led is shown
    this.opening = null; // what `openAddressed` returned, until that is open or the user went on
    this.chosenModel = ""; // by the user, for the conversation being opened
  }

  get current() {
    return this.chat.conversation;
  }

  /** The model that the conversation was held with which is open, or about to be; "" where that is not known. */
  get model() {
    return this.chosenModel || this.current.model;
  }

  /** Show what the address says, or a new conversation, once `ready`. Return whether it is shown: not where the user
   *  went on to something else meanwhile. */
  openAddressed(ready) {
    this.opening = this.openKept(location.hash.slice(1), this.step(), ready);
    return this.opening;
  }

  async openKept(id, step, ready) {
    const { current } = this;
    let found = current;
    try {
      await ready;
      if (id !== current.id) found = id ? await this.store.load(id) : null;
    } finally {
      if (step === this.numSteps) this.opening = null;
    }
    if (step !== this.numSteps) return false;
    if (found !== current && (found || !current.isEmpty)) this.chat.open(found ?? this.chat.newConversation());
    this.chat.goOnWith(this.chosenModel);
    this.chosenModel = "";
    this.onShown();
    return true;
  }

  /** Wait until what the user asked for is open. Return whether it is. */
  async opened() {
    return (await this.opening?.catch(() => false)) ?? true;
  }

  /** The user goes to another conversation, or on in the open one. Return the number of this step. */
  step() {
    this.opening = null;
    this.chosenModel = "";
    this.numSteps += 1;
    return this.numSteps;
  }

  /** Have the conversation that is open, or about to be, go on with another model. */
  goOnWith(model) {
    if (this.opening) this.chosenModel = model;
    else this.chat.goOnWith(model);
  }

  /** Put the id of the open conversation into the address, once there is something to come back to. */
  address() {
    this.step();
    const hash = this.current.isEmpty ? "" : `#${this.current.id}`;
    if (location.hash !== hash) history.pushState(null, "", hash || location.pathname + location.search);
  }

  open(conversation) {
    this.chat.open(conversation);
    this.address();
    this.onShown();
  }

  begin() {
    this.open(this.chat.newConversation());
  }

  /** Another tab has changed conversations. If the open one is among them, leave it if it was removed, or else show
   *  what was added, once no answer is being written to it there. Return whether it was left. */
  async takeOver(ids) {
    await this.opened(); // or else what the user asked for would not be
    const { id } = this.current;
    const isLeft = this.store.removed.has(id);
    if (isLeft) this.begin();
    else if (ids.includes(id)) this.showChanged(await this.store.load(id));
    this.onShown();
    return isLeft;
  }

  showChanged(changed) {
    if (!changed || changed.id !== this.current.id || changed.wasRunning) return;
    this.current.absorb(changed);
    this.chat.showChanged();
  }

  /** A conversation as it is: the open one may not be kept so yet. Null if there is none of this id. */
  async find(id) {
    const kept = await this.store.load(id);
    return id === this.current.id ? this.current : kept;
  }

  async rename(id, title) {
    const conversation = await this.find(id);
    if (!conversation) return; // another tab has deleted it
    conversation.rename(title);
    await this.store.save(conversation);
  }

  /** Delete a conversation and return it; see `find`. */
  async remove(id) {
    const removed = await this.find(id);
    const removal = this.store.remove(id); // before its answer is stopped, which would save it
    if (id === this.current.id && !this.opening) this.begin();
    await removal;
    this.onShown();
    return removed;
  }

  /** Delete everything. */
  async clear() {
    const removal = this.store.clear(this.current.id);
    this.begin();
    await removal;
    this.onShown();
  }

  async restore(conversation) {
    const step = this.step();
    await this.store.restore(conversation);
    if (step === this.numSteps) this.open(conversation);
    else this.onShown();
  }

  /** Save the open conversation or all of them as a file. Throws an Error if there is none. */
  async export(kind) {
    const { current } = this;
    if (kind === "markdown") {
      const { writeMarkdown } = await import("./markdown_file.js");
      const system = current.system === null ? [] : [{ role: "system", content: current.system }];
      const messages = current.path().map((it) => ({ role: it.role, content: it.role === "user" ? promptText(it) : it.content }));
      saveText(`${fileName(current.name)}.md`, "text/markdown", writeMarkdown(current.name, current.model, [...system, ...messages]));
      return;
    }
    if (kind === "html") {
      const { writeHtml } = await import("../share/html_file.js");
      saveText(`${fileName(current.name)}.html`, "text/html", await writeHtml(current, this.chat.settings.valuesOf(current).system));
      return;
    }
    const { writeJson } = await import("./json_file.js");
    const all = kind === "all" ? await this.store.all() : [current];
    if (!all.length) throw new Error(tr("There is no conversation to export yet."));
    saveText(`${kind === "all" ? "conversations" : fileName(current.name)}.json`, "application/json", writeJson(all.map((it) => it.record())));
  }

  /** Import files. Then open the latest of their conversations, unless the user has opened another meanwhile. Return how
   *  many were imported, `numNew`, and how many were here already, `numKnown`. Throws an Error that names the file that
   *  could not be read or kept. */
  async import(files) {
    const found = { new: [], known: [] };
    const step = this.step();
    const times = fallingTimes();
    try {
      for (const file of files) await this.importFile(file, times, found);
    } finally {
      const latest = latestOf(found.new) ?? latestOf(found.known);
      if (latest && step === this.numSteps && latest !== this.current) this.open(latest);
      else this.showImported();
    }
    return { numNew: found.new.length, numKnown: found.known.length };
  }

  /** Import a file and add its conversations to `found`. A conversation without a time gets the next of `times`. */
  async importFile(file, times, found) {
    const conversations = (await readFile(file, times)).filter((it) => !it.isEmpty);
    if (!conversations.length) throw new Error(tr("{file} holds no conversations, so nothing was imported.", { file: file.name }));
    const before = await this.store.all();
    for (const [i, conversation] of conversations.entries()) {
      const known = await this.knownAs(conversation, before);
      if (known?.contains(conversation)) {
        found.known.push(known);
        continue;
      }
      known?.takeIn(conversation);
      if (!(await this.store.restore(known ?? conversation))) {
        const kept = { count: i, total: conversations.length, file: file.name };
        throw new Error(tr("This browser could keep only {count} of the {total} conversations in {file}; it may have no room for more.", kept));
      }
      found.new.push(known ?? conversation);
    }
  }

  /** The conversation of the same id, or one of those kept `before` that contains an imported one and has its name; null
   *  if there is none. */
  async knownAs(imported, before) {
    const known = await this.find(imported.id);
    if (known) return known;
    const same = before.find((it) => it.name === imported.name && it.contains(imported));
    return same ? this.find(same.id) : null;
  }

  showImported() {
    this.chat.showChanged(); // the open conversation may be one of them
    this.onShown();
  }
}

function latestOf(conversations) {
  return conversations.reduce((first, it) => (it.updatedAt > (first?.updatedAt ?? -Infinity) ? it : first), null);
}

/** Times from now on backwards: with these, the list, which begins with the latest, keeps the order of the files. */
function* fallingTimes() {
  for (let time = Date.now(); ; time -= STEP_MS) yield time;
}

async function readFile(file, times) {
  const text = await file.text();
  try {
    const records = await readRecords(file.name, text);
    return records.map((record) => new Conversation({ ...record, updatedAt: record.updatedAt ?? times.next().value }));
  } catch (error) {
    throw new Error(tr("{file} could not be imported: {reason}.", { file: file.name, reason: error.message }));
  }
}

async function readRecords(name, text) {
  if (/\.md$/i.test(name)) {
    const { readMarkdown } = await import("./markdown_file.js");
    return [readMarkdown(text)];
  }
  const { readJson } = await import("./json_file.js");
  return readJson(text);
}

function fileName(name) {
  return name.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").toLowerCase() || "conversation";
}
