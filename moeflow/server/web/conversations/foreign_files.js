// Reads conversations that other programs have exported: ChatGPT, Open WebUI, and lists of messages as the API takes
// them. Prompts and answers alternate in a record; all other messages are dropped.

import { newId } from "./conversation.js";

/** Records of conversations that a JSON file holds, by its content; null where the form is not known. */
export function readForeign(content) {
  const entries = Array.isArray(content) ? content : [content];
  const areAll = (test) => entries.every((entry) => test(entry ?? {}));
  if (areAll((entry) => entry.mapping)) return entries.map(readChatGpt);
  if (areAll((entry) => chatOf(entry).history?.messages)) return entries.map(readOpenWebUi);
  if (areAll((entry) => Array.isArray(entry.messages))) return entries.map(readMessages);
  if (areAll((entry) => typeof entry.role === "string")) return [readMessages({ messages: entries })];
  return null;
}

export function textOf(content) {
  if (typeof content === "string") return content;
  const parts = Array.isArray(content) ? content : [];
  return parts.map((part) => (typeof part === "string" ? part : (part?.text ?? ""))).join("");
}

export function timeOf(milliseconds) {
  return Number.isFinite(milliseconds) && milliseconds > 0 ? milliseconds : undefined;
}

function readMessages({ title, model, messages }) {
  const first = messages[0]?.role === "system" ? textOf(messages[0].content) : "";
  const builder = new Builder({ title: textOf(title), model: textOf(model), system: first || null });
  let parent = "";
  for (const { role, content } of messages) parent = builder.add(parent, role, textOf(content)) ?? parent;
  return builder.record;
}

/** ChatGPT exports a tree, too, with messages of tools and of the system between the others. */
function readChatGpt({ title, mapping, current_node: current, update_time: updatedAtS }) {
  const known = { title: textOf(title), updatedAt: timeOf(updatedAtS * 1000) };
  const nodes = Object.values(mapping).map(({ id, parent, children, message }) => {
    return { id, parent, children, role: message?.author?.role, content: textOf(message?.content?.parts) };
  });
  return readTree(known, nodes, current);
}

/** Open WebUI has a tree of messages, and thoughts and sources in their text. */
function readOpenWebUi(entry) {
  const { title, models, history, system, params } = chatOf(entry);
  const known = { title: textOf(entry.title ?? title), model: textOf(models?.[0]), updatedAt: timeOf(entry.updated_at * 1000) };
  known.system = textOf(params?.system ?? system) || null;
  const nodes = Object.values(history.messages).map(({ id, parentId, childrenIds, role, content, files }) => {
    return { id, parent: parentId, children: childrenIds, role, content: withoutDetails(textOf(content)), files: readFiles(files) };
  });
  return readTree(known, nodes, history.currentId);
}

/** Open WebUI wraps a chat in its row of the database; older exports hold the chat alone. */
function chatOf(entry) {
  return entry.chat ?? entry;
}

/** A text without the folded parts that Open WebUI writes into answers: thoughts, and calls of tools. */
function withoutDetails(text) {
  return text.replace(/<details type="(?:reasoning|tool_calls|code_interpreter)"[^>]*>[\s\S]*?<\/details>\n*/g, "");
}

/** Attached texts, as far as they are in the file. */
function readFiles(files) {
  const known = (Array.isArray(files) ? files : []).map((it) => ({ name: textOf(it?.name), text: textOf(it?.file?.data?.content) }));
  return known.filter(({ text }) => text);
}

/** Read a tree of nodes { id, parent, children, role, content, files }. The node `current` ends the path that is shown. */
function readTree(known, nodes, current) {
  const builder = new Builder(known);
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const ids = new Map(); // of the messages that nodes became
  const visited = new Set(); // a damaged file may have rings
  const waiting = nodes.filter((node) => !byId.has(node.parent)).map((node) => [node, ""]);
  while (waiting.length) {
    const [node, parent] = waiting.pop();
    if (visited.has(node)) continue;
    visited.add(node);
    const id = builder.add(parent, node.role, node.content, node.files);
    if (id) ids.set(node, id);
    const children = (node.children ?? []).map((child) => byId.get(child)).filter(Boolean);
    for (const child of children.toReversed()) waiting.push([child, id ?? parent]);
  }
  for (let node = byId.get(current); visited.delete(node); node = byId.get(node.parent)) if (ids.has(node)) builder.choose(ids.get(node));
  return builder.record;
}

/** Builds a record of alternating prompts and answers. */
class Builder {
  constructor(known) {
    this.record = { id: newId(), ...known, chosen: {}, messages: [] };
    this.byId = new Map();
  }

  /** Add a message and return its id; null if it is none that is shown. A second answer in a row continues the first. */
  add(parent, role, content, files = []) {
    if (!(content || files.length) || !["user", "assistant"].includes(role)) return null;
    const before = this.byId.get(parent);
    if (role === (before?.role ?? "assistant")) {
      if (!before) return null; // an answer to nothing
      before.content += `\n\n${content}`;
      if (files.length) before.files.push(...files);
      return parent;
    }
    const message = role === "user" ? { id: newId(), parent, role, content, files } : { id: newId(), parent, role, content };
    this.record.messages.push(message);
    this.byId.set(message.id, message);
    return message.id;
  }

  choose(id) {
    const message = this.byId.get(id);
    this.record.chosen[message.parent] = id;
  }
}
