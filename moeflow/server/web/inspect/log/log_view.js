// The newest lines of the server's log, live: by level and text, to pause and to copy.

import { setText } from "../../set_text.js";
import { tr } from "../../translate.js";
import { make } from "../elements.js";
import { action, useStyle } from "../manage/parts.js";
import { lineElement, lineText } from "./log_line.js";

const MAX_LINES = 1000; // that are kept here, as by the server
const LEVELS = ["debug", "info", "warning", "error", "critical"];
const POLLED = ["/tokenize", "/v1/models"]; // by the page, while it is open
const NEAR_END = 40; // pixels

export default class LogView {
  static periodMs = 1000;

  constructor(element, { ask, copy }) {
    useStyle();
    this.ask = ask;
    this.scroller = element.parentElement;
    this.lines = []; // of the server, oldest first
    this.after = 0; // number of the newest
    this.isPaused = false;
    this.level = make("select", {}, ...["debug", "info", "warning", "error"].map((level) => new Option(level, level, false, level === "debug")));
    this.filter = make("input", { type: "search", autocomplete: "off", spellcheck: false });
    this.polls = make("input", { type: "checkbox" });
    this.pause = action(tr("Pause"), () => this.togglePause(), "secondary");
    this.copyButton = action(tr("Copy"), () => copy(this.wanted.map(lineText).join("\n"), this.copyButton), "secondary");
    this.state = make("p", { className: "hint" });
    this.list = make("ol", { className: "log-lines" });
    const tools = make("div", { className: "log-tools" });
    tools.append(make("label", {}, tr("Level"), this.level), make("label", {}, tr("Text"), this.filter), make("label", {}, this.polls, tr("Routine requests of the page")), this.pause, this.copyButton);
    element.append(tools, this.state, this.list);
    for (const control of [this.level, this.filter, this.polls]) control.addEventListener("input", () => this.showAll());
  }

  /** The lines that level and text select. */
  get wanted() {
    return this.lines.filter((line) => this.isWanted(line));
  }

  isWanted(line) {
    const text = this.filter.value.trim().toLowerCase();
    if (!this.polls.checked && isPoll(line)) return false;
    return LEVELS.indexOf(line.level) >= LEVELS.indexOf(this.level.value) && (!text || lineText(line).toLowerCase().includes(text));
  }

  async update(signal) {
    if (this.isPaused) return;
    const { lines, newest, is_complete } = await this.ask(`stats/log?after=${this.after}`, { signal });
    if (this.isPaused || signal?.aborted) return;
    const isFirst = this.after === 0;
    this.after = newest;
    this.lines = [...(is_complete ? this.lines : []), ...lines].slice(-MAX_LINES);
    if (!is_complete) this.list.replaceChildren();
    this.append(lines, { isFirst });
  }

  /** Show new lines, and stay at the end if that is in view. */
  append(lines, { isFirst = false } = {}) {
    const { scroller, list } = this;
    const isAtEnd = isFirst || scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END;
    list.append(...lines.filter((line) => this.isWanted(line)).map(lineElement));
    while (list.childElementCount > MAX_LINES) list.firstElementChild.remove();
    if (isAtEnd && lines.length) scroller.scrollTop = scroller.scrollHeight;
    this.tellCount();
  }

  showAll() {
    this.list.replaceChildren();
    this.append(this.lines, { isFirst: true });
  }

  togglePause() {
    this.isPaused = !this.isPaused;
    setText(this.pause, this.isPaused ? tr("Go on") : tr("Pause"));
    this.tellCount();
    if (!this.isPaused) this.update();
  }

  tellCount() {
    const counts = { shown: this.list.childElementCount, total: this.lines.length };
    const text = tr("{shown} of {total} lines", counts);
    setText(this.state, this.isPaused ? tr("{text}, paused", { text }) : text);
  }
}

/** Whether a line is of a request that pages send again and again, and that went well. */
function isPoll({ message, fields }) {
  return message === "request" && POLLED.includes(fields.path) && fields.status < 400;
}
