// A conversation as a Markdown file: its shown path, for readers. A comment before each message, which
// readers of Markdown do not show, says whose it is, so that the file can be read back exactly.

import { tr } from "../translate.js";
import { newId } from "./conversation.js";

const MARK = /^<!-- moeflow: (system|user|assistant) -->$/;
const MODEL = /^<!-- moeflow: model (.+) -->$/m; // before the messages: the model that continues the conversation
const ESCAPED = /^\\*<!-- moeflow: /; // a line of a message that would read as a mark: one more backslash before it

/** The text of the file, of a title, the name of a model ("": not known) and messages { role, content }. The first
 *  may be the conversation's own system prompt. */
export function writeMarkdown(title, model, messages) {
  const names = { system: tr("System prompt"), user: tr("You"), assistant: tr("Answer") };
  const parts = messages.map(({ role, content }) => `<!-- moeflow: ${role} -->\n**${names[role]}:**\n\n${escaped(content)}\n`);
  if (model) parts.unshift(`<!-- moeflow: model ${model} -->\n`);
  return [`# ${title.replaceAll("\n", " ")}\n`, ...parts].join("\n");
}

/** The record of the conversation in a file. Throws an Error whose message is for the user. */
export function readMarkdown(text) {
  const [head, ...messages] = cut(text.replace(/\r\n?/g, "\n"));
  if (!messages.length) throw new Error(tr("it was not exported here: no line says where messages begin"));
  const title = /^# (.*)$/m.exec(head.lines[0])?.[1] ?? "";
  const model = MODEL.exec(head.lines.join("\n"))?.[1] ?? "";
  const record = { id: newId(), title, model, chosen: {}, messages: [] };
  let parent = "";
  for (const { role, lines } of messages) {
    const end = lines.at(-1) === "" ? -1 : undefined;
    const content = unescaped(lines.slice(2, end).join("\n")); // its name and an empty line before it, one behind it
    if (role === "system") {
      record.system = content;
      continue;
    }
    const message = { id: newId(), parent, role, content };
    if (role === "user") message.files = [];
    record.messages.push(message);
    parent = message.id;
  }
  return record;
}

function cut(text) {
  const parts = [{ role: null, lines: [] }];
  for (const line of text.split("\n")) {
    const role = MARK.exec(line)?.[1];
    if (role) parts.push({ role, lines: [] });
    else parts.at(-1).lines.push(line);
  }
  return parts;
}

function escaped(content) {
  return content.split("\n").map((line) => (ESCAPED.test(line) ? `\\${line}` : line)).join("\n");
}

function unescaped(content) {
  return content.split("\n").map((line) => (line.startsWith("\\") && ESCAPED.test(line) ? line.slice(1) : line)).join("\n");
}
