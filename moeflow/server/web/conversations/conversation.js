// A conversation as data: a tree of messages, where prompts answer answers. A retry or an edited prompt adds a version.
// One version of each group is chosen, and the chosen ones form the shown path.
// A prompt whose answer never came is shown but not sent: chat templates want user and assistant to alternate.

import { tr } from "../translate.js";
import { branchIds, renew, withoutRemoved } from "./branches.js";
import { containsPaths, mergeMessages, withoutVain } from "./merge.js";

const MAX_TITLE = 60; // characters
const HEAD = ["title", "model", "preset", "system"]; // holds for the whole conversation

export class Conversation {
  /** From `record()`, as it was kept or imported; without one a new conversation. */
  constructor({ id = newId(), title = "", model = "", preset = "", system = null, updatedAt = Date.now(), messages = [], chosen = {}, removed = [] } = {}) {
    Object.assign(this, { id, title, updatedAt });
    this.preset = preset; // the id of the preset that it is held with; "" is the default one
    this.system = system; // its own system prompt; null: that of its preset
    this.model = model; // the one to go on with: asked last, or chosen since; "" where that is not known
    this.wasRunning = messages.some((message) => message.state === "running"); // in another tab, or before a reload
    this.messages = messages.map(asLeft);
    this.changed = new Set(); // which of `HEAD` were changed here, and are not saved yet
    this.removed = new Set(removed); // ids of deleted messages, which other tabs and imported copies may still have
    this.chosen = { ...chosen }; // the id of the child to show, by that of its parent, "" for the first prompts'
  }

  /** The stored form: plain data. */
  record() {
    const { id, title, model, preset, system, updatedAt, chosen } = this;
    // Token trees are larger than all else, and would evict conversations.
    const messages = this.messages.map((it) => (it.passes ? { ...it, passes: [] } : it));
    return { id, title, model, preset, system, updatedAt, chosen, messages, removed: [...this.removed] };
  }

  get isEmpty() {
    return this.messages.length === 0;
  }

  /** The title, given or taken from the first prompt. */
  get name() {
    return this.title || titleOf(this.path()[0]);
  }

  children(parentId) {
    return this.messages.filter((message) => message.parent === parentId);
  }

  /** All versions of a message, itself among them. */
  versions(message) {
    return this.children(message.parent);
  }

  /** The messages shown, from the first prompt on. */
  path() {
    const path = [];
    for (let parent = ""; ; ) {
      const versions = this.children(parent);
      if (!versions.length) return path;
      const next = versions.find((message) => message.id === this.chosen[parent]) ?? versions.at(-1);
      path.push(next);
      parent = next.id;
    }
  }

  /** The path in pairs: each prompt with its answer, which is null before it was asked for. */
  turns() {
    const path = this.path();
    const answerTo = (prompt) => path.find(({ parent, role }) => parent === prompt.id && role === "assistant") ?? null;
    return path.filter(({ role }) => role === "user").map((prompt) => ({ prompt, answer: answerTo(prompt) }));
  }

  rename(title) {
    this.change("title", title);
  }

  /** Go on with this model, if it is known and there is something to go on with. Return whether that changes it. */
  useModel(model) {
    if (!model || this.isEmpty || model === this.model) return false;
    this.change("model", model);
    return true;
  }

  change(name, value) {
    this[name] = value;
    this.changed.add(name);
  }

  /** This record of the conversation is stored now; later changes are not. */
  noteKept(record) {
    for (const name of this.changed) if (this[name] === record[name]) this.changed.delete(name);
  }

  /** Take in what another tab has made of this conversation. The shown path stays, and its continuation is added. */
  absorb(theirs) {
    for (const name of HEAD) if (!this.changed.has(name)) this[name] = theirs[name];
    this.updatedAt = Math.max(this.updatedAt, theirs.updatedAt);
    this.removed = new Set([...this.removed, ...theirs.removed]);
    this.messages = withoutRemoved(mergeMessages(this.messages, theirs.messages), this.removed);
    this.chosen = { ...theirs.chosen, ...this.chosen };
  }

  /** Whether all that the other conversation says is in this one. */
  contains(other) {
    return containsPaths(this.messages, other.messages);
  }

  /** Take in the messages of an imported copy. */
  takeIn(copy) {
    renew(copy.messages, copy.chosen, this.removed, newId);
    this.messages = mergeMessages(this.messages, copy.messages);
    this.chosen = { ...copy.chosen, ...this.chosen };
  }

  choose(message) {
    this.chosen[message.parent] = message.id;
  }

  /** Show a message, and so the path to it. */
  openBranch(message) {
    const byId = new Map(this.messages.map((it) => [it.id, it]));
    for (let it = message; it; it = byId.get(it.parent)) this.choose(it);
  }

  /** Delete a message and all that follows it. Return what `restore` takes. */
  remove(message) {
    const ids = branchIds(this.messages, message);
    const messages = this.messages.filter(({ id }) => ids.has(id));
    this.removed = new Set([...this.removed, ...ids]);
    this.messages = this.messages.filter(({ id }) => !ids.has(id));
    const chosen = Object.fromEntries(Object.entries(this.chosen).filter(([parent, child]) => ids.has(parent) || ids.has(child)));
    return { messages, chosen };
  }

  /** Put deleted messages back. They get new ids: tabs that have heard of the deletion would drop the old ones. */
  restore({ messages, chosen }) {
    renew(messages, chosen, this.removed, newId);
    this.messages = [...this.messages, ...messages];
    Object.assign(this.chosen, chosen);
  }

  addPrompt(content, files, parentId = this.path().at(-1)?.id ?? "") {
    return this.add({ role: "user", content, files }, parentId);
  }

  /** An answer to come; for `asked` see `newAnswer`. It replaces an answer that failed before its first word, unless the conversation continued
  below it. */
  addAnswer(prompt, asked = null) {
    const answer = this.add({ ...newAnswer(), asked }, prompt.id);
    this.messages = withoutVain(this.messages);
    return answer;
  }

  add(message, parent) {
    const added = { id: newId(), parent, ...message };
    this.messages.push(added);
    this.choose(added);
    return added;
  }
}

function newAnswer() {
  return {
    role: "assistant",
    content: "",
    reasoning: "", // what the model said to itself before
    reasoningS: null, // for how long
    toolCalls: [], // { name, arguments }, the latter as the model wrote them
    asked: null, // with what: { model, preset (name), values (the changed ones), isOwn (other than the conversation's) }
    state: "running", // running, done, stopped, failed, refused (for want of an API key)
    error: null, // what to tell the user, when failed
    cutOff: false, // the answer reached max tokens
    numLeftOut: 0, // turns from the beginning that the model did not see, as the context was full
    measured: null, // see answer.js
    usage: null, // the server's count of tokens
    requestId: null, // the server's, of the last request for this answer
    tokens: null, // with probabilities, if requested: see token_record.js
    passes: [], // their drafts, if requested: `token_trees` of the API
  };
}

/** A reload ends a running answer, as the stop button does. */
function asLeft(message) {
  const whole = message.role === "assistant" ? { ...newAnswer(), state: "done", ...message } : message;
  return whole.state === "running" ? { ...whole, state: "stopped" } : whole;
}

function titleOf(prompt) {
  const line = (prompt?.content.trim() || prompt?.files?.[0]?.name || tr("New conversation")).split("\n")[0];
  const characters = [...line];
  return characters.length > MAX_TITLE ? `${characters.slice(0, MAX_TITLE).join("").trimEnd()}…` : line;
}

/** A name that nothing else has. `crypto.randomUUID` exists only on https and on this machine. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
