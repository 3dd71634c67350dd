// The content of memory, and how much is left.

import { setStyles } from "../canvas.js";
import { formatBytes } from "../bytes.js";
import { make } from "../elements.js";
import { setText } from "../../set_text.js";
import { tr } from "../../translate.js";
import { digits } from "./units.js";

const PARTS = [
  ["weights", (use) => use.weights_bytes, () => tr("Weights")],
  ["kv", (use) => use.kv_used_bytes, () => tr("Keys and values in use")],
  ["cached", (use) => use.kv_cached_bytes, () => tr("Keys and values of earlier prompts")],
  ["other", (use) => use.other_bytes, () => tr("Processes and work space")],
  ["free", (use) => freeBytes(use), () => tr("Free")],
];

export class MemoryBar {
  constructor() {
    this.head = make("p", { className: "speed-left" });
    this.note = make("p", { className: "hint" });
    this.bar = make("div", { className: "memory-bar", "aria-hidden": "true" });
    this.parts = PARTS.map(([name]) => {
      const part = this.bar.appendChild(make("span"));
      part.dataset.part = name;
      return part;
    });
    this.sizes = PARTS.map(() => make("dd"));
    this.list = make("dl", { className: "memory-list" }, ...PARTS.map(([name, , title], i) => item(name, title(), this.sizes[i])));
    this.element = make("div", {}, this.head, this.bar, this.list, this.note);
  }

  /** `use` is `memory` of /stats/speed, null if it is not known. */
  show(use) {
    this.element.hidden = !use;
    if (!use) return;
    setText(this.head, headText(use));
    setText(this.note, noteText(use));
    const sizes = PARTS.map(([, size]) => size(use));
    const total = sizes.reduce((sum, size) => sum + size, 0) || 1;
    this.parts.forEach((part, i) => setStyles(part, { "flex-grow": String(sizes[i] / total) }));
    this.sizes.forEach((element, i) => setText(element, formatBytes(sizes[i])));
  }
}

/** What this model may still take: up to its limit, or what the machine has free. */
function freeBytes(use) {
  return use.is_limit_set ? Math.max(use.limit_bytes - use.used_bytes, 0) : use.free_bytes;
}

function headText(use) {
  return tr("{free} of memory is left. The server uses {used}.", { free: formatBytes(freeBytes(use)), used: formatBytes(use.used_bytes) });
}

function noteText(use) {
  const values = { tokens: digits(use.kv_tokens_free), bytes: formatBytes(use.kv_free_bytes + use.kv_cached_bytes), more: digits(use.tokens_in_free_bytes ?? 0) };
  const parts = [tr("Requests may still have {tokens} tokens of context in all, {bytes} of keys and values.", values)];
  if (use.is_limit_set) parts.push(tr("The limit is {limit} (--memory).", { limit: formatBytes(use.limit_bytes) }));
  else if (use.tokens_in_free_bytes) parts.push(tr("All free memory would hold {more} tokens (--kv-cache).", values));
  return parts.join(" ");
}

function item(name, title, size) {
  const sign = make("span", { className: "memory-sign", "aria-hidden": "true" });
  sign.dataset.part = name;
  return make("div", {}, make("dt", {}, sign, title), size);
}
