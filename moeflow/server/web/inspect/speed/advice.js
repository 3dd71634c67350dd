// What would help most, as the planner expects it; with commands to copy.

import { formatBytes } from "../bytes.js";
import { make } from "../elements.js";
import { setText } from "../../set_text.js";
import { tr } from "../../translate.js";
import { digits, factor } from "./units.js";

const IN_WORK = "being worked out"; // of the server

export class AdviceList {
  /** `copy(text, button)` copies a command. */
  constructor(copy) {
    this.copy = copy;
    this.reason = make("p", { className: "hint" });
    this.list = make("ol", { className: "advice" });
    this.element = make("div", {}, this.reason, this.list);
    this.shown = null;
  }

  /** `advice` is that of /stats/speed; `memoryNow` is the plan's peak in bytes, null if unknown. `isRough`: the machine
   *  was measured beside other work. */
  show({ items, unknown }, memoryNow, isRough) {
    setText(this.reason, reasonText(items, unknown, isRough));
    const key = JSON.stringify([items, memoryNow]);
    if (key === this.shown) return; // a new list would take the focus from its buttons
    this.shown = key;
    this.list.replaceChildren(...(items ?? []).map((it) => this.item(it, memoryNow)));
  }

  item(it, memoryNow) {
    const parts = [make("p", { className: "advice-change" }, make("strong", { textContent: changeText(it) }), " ", make("span", { textContent: gainText(it) }))];
    const more = moreText(it, memoryNow);
    if (more) parts.push(make("p", { className: "hint", textContent: more }));
    if (it.command) parts.push(this.command(it.command));
    return make("li", {}, ...parts);
  }

  command(text) {
    const button = make("button", { type: "button", className: "quiet", textContent: tr("Copy") });
    button.setAttribute("aria-label", tr("Copy the command {command}", { command: text }));
    button.addEventListener("click", () => this.copy(text, button));
    return make("div", { className: "advice-command" }, make("code", { textContent: text }), button);
  }
}

function reasonText(items, unknown, isRough) {
  if (unknown === IN_WORK) return tr("Working out what would help…");
  if (unknown) return tr("What would help is not known: {reason}", { reason: tr(unknown) });
  if (!items.length) return tr("The planner knows no change that would help.");
  const what = tr("The planner's estimates for this machine, each planned anew.");
  return isRough ? `${what} ${tr("They are rough: other work disturbed the measurement of the machine.")}` : what;
}

function changeText({ kind, change, option, full_tokens_per_s: full }) {
  if (kind === "option") return tr("Start with {option}", { option });
  if (kind === "batch") return tr("{count} requests at once", { count: change.split(" ")[0] });
  return option ? `${sentence(tr(change))} (${option})` : sentence(tr(change));
}

const sentence = (text) => text[0].toUpperCase() + text.slice(1);

function gainText({ speedup_alone: alone, speedup_full: full, kind }) {
  if (kind === "batch") return tr("{factor} times as many tokens/s in all", { factor: digits(full, 2) });
  const parts = [];
  if (alone !== null) parts.push(tr("{factor} for one request", { factor: factor(alone) }));
  if (full !== null) parts.push(tr("{factor} for many at once", { factor: factor(full) }));
  return parts.join(", ");
}

function moreText({ kind, alone_tokens_per_s: alone, full_tokens_per_s: full, memory_bytes: numBytes }, memoryNow) {
  if (kind === "batch") return tr("{speed} tokens/s together, by batch jobs or by several clients.", { speed: digits(full) });
  const parts = [];
  if (alone) parts.push(tr("{speed} tokens/s alone", { speed: digits(alone) }));
  if (full) parts.push(tr("{speed} tokens/s together", { speed: digits(full) }));
  if (numBytes) {
    const values = { size: formatBytes(numBytes), now: formatBytes(memoryNow ?? 0) };
    parts.push(memoryNow ? tr("memory at most {size} instead of {now}", values) : tr("memory at most {size}", values));
  }
  return parts.join(" · ");
}
