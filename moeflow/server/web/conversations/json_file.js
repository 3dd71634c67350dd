// Conversations as a JSON file, whole: all versions of all messages. Reads its own files and those of other programs.
// A record has no `updatedAt` where the file does not say when that was.

import { checkedTokens } from "../chat/token_record.js";
import { tr } from "../translate.js";
import { newId } from "./conversation.js";
import { checkedAsked, checkedMeasured } from "./checked_answer.js";
import { readForeign, textOf, timeOf } from "./foreign_files.js";

const ID = /^[0-9a-f]{24}$/; // of a conversation, see `newId`
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
    throw new Error(tr("it is not JSON; it may be cut off"));
  }
  if (content?.format === FORMAT) return readOwn(content);
  const records = readForeign(content);
  if (records) return records;
  throw new Error(tr("it holds no conversations in a form that is known here: moeflow’s, ChatGPT’s, Open WebUI’s, or messages as the API takes them"));
}

function readOwn({ version, conversations }) {
  if (version !== 1) throw new Error(tr("it is of version {version}; this page reads version 1", { version }));
  return conversations.map(({ id, title, model, preset, system, updatedAt, messages, chosen }) => {
    const record = { id: ID.test(id) ? id : newId(), title: textOf(title), model: textOf(model), updatedAt: timeOf(updatedAt), chosen: { ...chosen } };
    Object.assign(record, { preset: textOf(preset), system: typeof system === "string" ? system : null });
    return { ...record, messages: checkTree(messages.map(checked)) };
  });
}

/** Messages that are a tree, each behind the one that it answers. Of others no path would come to an end. */
function checkTree(messages) {
  const earlier = new Set([""]); // the parent of the first prompts
  for (const { id, parent } of messages) {
    if (earlier.has(id)) throw new Error(id ? tr("a message in it has an id that is not its own") : tr("a message in it has an id that is empty"));
    if (!earlier.has(parent)) throw new Error(tr("a message in it answers none before it"));
    earlier.add(id);
  }
  return messages;
}

/** Files may come from anywhere: only what the page knows, as what the page takes it for. */
function checked(message) {
  const { id, parent, role, content, files, reasoning, ...others } = message;
  if (typeof id !== "string" || typeof parent !== "string" || typeof content !== "string") throw new Error(tr("a message in it lacks id, parent or content"));
  if (role === "user") {
    const kept = (files ?? []).map(({ name, text }) => ({ name: String(name), text: String(text) }));
    return { id, parent, role, content, files: kept };
  }
  if (role !== "assistant") throw new Error(tr("a message in it has the role {role}", { role: JSON.stringify(role) }));
  const { state, cutOff, reasoningS, asked, measured, tokens } = others;
  const known = { state: state === "stopped" ? state : "done", cutOff: cutOff === true, asked: checkedAsked(asked), measured: checkedMeasured(measured), tokens: checkedTokens(tokens) };
  return { id, parent, role, content, reasoning: String(reasoning ?? ""), reasoningS: Number(reasoningS) || null, ...known };
}
