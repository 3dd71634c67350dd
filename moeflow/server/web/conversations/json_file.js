// Conversations as a JSON file, whole: all versions of all messages. Reads what it writes, the export of ChatGPT, and
// lists of messages as the API takes them. A record has no `updatedAt` where the file does not say when that was.

import { newId } from "./conversation.js";

const FORMAT = "moeflow-conversations";

/** The text of a file with these records, see `Conversation.record`. */
export function writeJson(records) {
  return `${JSON.stringify({ format: FORMAT, version: 1, conversations: records }, null, 1)}\n`;
}

/** Records of the conversations in a file. Throws an Error whose message is for the user. */
export function readJson(text) {
  let content;
  try {
    content = JSON.parse(text);
  } catch {
    throw new Error("it is not JSON; it may be cut off");
  }
  if (content?.format === FORMAT) return readOwn(content);
  const entries = Array.isArray(content) ? content : [content];
  if (entries.every((entry) => entry?.mapping)) return entries.map(readChatGpt);
  if (entries.every((entry) => Array.isArray(entry?.messages))) return entries.map(readMessages);
  if (entries.every((entry) => typeof entry?.role === "string")) return [readMessages({ messages: entries })];
  throw new Error("it holds no conversations in a form that is known here: moeflow’s, ChatGPT’s, or messages as the API takes them");
}

function readOwn({ version, conversations }) {
  if (version !== 1) throw new Error(`it is of version ${version}; this page reads version 1`);
  return conversations.map(({ title, model, updatedAt, messages, chosen }) => {
    const record = { id: newId(), title: textOf(title), model: textOf(model), updatedAt: timeOf(updatedAt), chosen: { ...chosen } };
    return { ...record, messages: checkTree(messages.map(checked)) };
  });
}

function timeOf(milliseconds) {
  return Number.isFinite(milliseconds) && milliseconds > 0 ? milliseconds : undefined;
}

/** Messages that are a tree, each behind the one that it answers. Of others no path would come to an end. */
function checkTree(messages) {
  const earlier = new Set([""]); // the parent of the first prompts
  for (const { id, parent } of messages) {
    if (earlier.has(id)) throw new Error(`a message in it has an id that is ${id ? "not its own" : "empty"}`);
    if (!earlier.has(parent)) throw new Error("a message in it answers none before it");
    earlier.add(id);
  }
  return messages;
}

/** Files may come from anywhere: only what the page knows, as what the page takes it for. */
function checked(message) {
  const { id, parent, role, content, files, reasoning, ...others } = message;
  if (typeof id !== "string" || typeof parent !== "string" || typeof content !== "string") throw new Error("a message in it lacks id, parent or content");
  if (role === "user") {
    const kept = (files ?? []).map(({ name, text }) => ({ name: String(name), text: String(text) }));
    return { id, parent, role, content, files: kept };
  }
  if (role !== "assistant") throw new Error(`a message in it has the role ${JSON.stringify(role)}`);
  const { state, cutOff, reasoningS } = others;
  const known = { state: state === "stopped" ? state : "done", cutOff: cutOff === true };
  return { id, parent, role, content, reasoning: String(reasoning ?? ""), reasoningS: Number(reasoningS) || null, ...known };
}

function readMessages({ title, model, messages }) {
  const builder = new Builder({ title: textOf(title), model: textOf(model) });
  let parent = "";
  for (const { role, content } of messages) parent = builder.add(parent, role, textOf(content)) ?? parent;
  return builder.record;
}

/** ChatGPT has a tree as well, with messages of tools and of the system in between. */
function readChatGpt({ title, mapping, current_node: current, update_time: updatedAtS }) {
  const builder = new Builder({ title: textOf(title), updatedAt: timeOf(updatedAtS * 1000) });
  const ids = {};
  const visited = new Set(); // a damaged file may have rings
  const visit = (node, parent) => {
    const message = node.message;
    const id = message ? builder.add(parent, message.author?.role, textOf(message.content?.parts)) : null;
    if (id) ids[node.id] = id;
    return id ?? parent;
  };
  const waiting = Object.values(mapping).filter((node) => !mapping[node.parent]).map((node) => [node, ""]);
  while (waiting.length) {
    const [node, parent] = waiting.pop();
    if (visited.has(node)) continue;
    visited.add(node);
    const next = visit(node, parent);
    for (const child of (node.children ?? []).toReversed()) if (mapping[child]) waiting.push([mapping[child], next]);
  }
  for (let node = mapping[current]; visited.delete(node); node = mapping[node.parent]) if (ids[node.id]) builder.choose(ids[node.id]);
  return builder.record;
}

function textOf(content) {
  if (typeof content === "string") return content;
  const parts = Array.isArray(content) ? content : [];
  return parts.map((part) => (typeof part === "string" ? part : (part?.text ?? ""))).join("");
}

/** Puts a record together in which prompts and answers alternate, whatever stood between them. */
class Builder {
  constructor(known) {
    this.record = { id: newId(), ...known, chosen: {}, messages: [] };
    this.byId = new Map();
  }

  /** Add a message and return its id; null if it is none that is shown. A second answer in a row continues the first. */
  add(parent, role, content) {
    if (!content || !["user", "assistant"].includes(role)) return null;
    const before = this.byId.get(parent);
    if (role === (before?.role ?? "assistant")) {
      if (!before) return null; // an answer to nothing
      before.content += `\n\n${content}`;
      return parent;
    }
    const message = role === "user" ? { id: newId(), parent, role, content, files: [] } : { id: newId(), parent, role, content };
    this.record.messages.push(message);
    this.byId.set(message.id, message);
    return message.id;
  }

  choose(id) {
    const message = this.byId.get(id);
    this.record.chosen[message.parent] = id;
  }
}
