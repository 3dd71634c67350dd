// One line of the server's log as an element, and as text to copy.

import { language } from "../../translate.js";
import { make } from "../elements.js";

/** "2026-11-29T09:14:22.123Z" */
const timeText = (line) => new Date(line.time_s * 1000).toISOString();

const fieldsText = ({ fields }) => Object.entries(fields).map(([name, value]) => `${name}=${value}`).join(" ");

/** The line as the log has it. */
export function lineText(line) {
  const words = [timeText(line), line.level.toUpperCase(), `${line.logger}:`, line.message, fieldsText(line)];
  return [words.filter(Boolean).join(" "), line.exception].filter(Boolean).join("\n");
}

/** A list item. */
export function lineElement(line) {
  const time = timeText(line);
  const level = make("span", { className: `log-level ${line.level}`, textContent: line.level.toUpperCase() });
  const item = make("li", {}, make("time", { dateTime: time, textContent: new Date(time).toLocaleTimeString(language()) }), " ", level, " ");
  item.append(make("span", { className: "log-source", textContent: `${line.logger.replace(/^moeflow\./, "")}: ` }), line.message);
  const fields = fieldsText(line);
  if (fields) item.append(" ", make("span", { className: "log-fields", textContent: fields }));
  if (line.exception) item.append(make("pre", { textContent: line.exception }));
  return item;
}
