// Where the time of a request went: one bar, and the same as a table.

import { formatPercent, textKey, tr } from "../../translate.js";
import { setStyles } from "../canvas.js";
import { make } from "../elements.js";
import { seconds } from "./format.js";

const NAMES = {
  received: textKey("Received and admitted"),
  tokenized: textKey("Text to tokens"),
  queued: textKey("In the queue"),
  waiting: textKey("Queue or prompt"),
  prompt: textKey("Prompt"),
  decode: textKey("Answer"),
  sent: textKey("Sent to the client"),
};
const HEADS = [textKey("Phase"), textKey("From"), textKey("Took"), textKey("Share")];

function nameOf({ name }) {
  const title = NAMES[name];
  return tr(title);
}

/** `story` is a request's, of the server. */
export function phasesElement({ phases, total_s: totalS }) {
  const share = (phase) => (totalS ? phase.duration_s / totalS : 0);
  const label = phases.map((phase) => `${nameOf(phase)} ${formatPercent(share(phase))}`).join(", ");
  const bar = make("div", { className: "phase-bar", role: "img", "aria-label": label });
  for (const phase of phases) {
    const part = make("span", { title: `${nameOf(phase)}: ${seconds(phase.duration_s)}`, "data-phase": phase.name });
    setStyles(part, { "flex-grow": String(phase.duration_s) });
    bar.append(part);
  }
  const rows = phases.map((phase) => {
    const name = make("th", { scope: "row" }, make("span", { className: "phase-mark", "data-phase": phase.name }), nameOf(phase));
    const texts = [seconds(phase.start_s), seconds(phase.duration_s), formatPercent(share(phase))];
    return make("tr", {}, name, ...texts.map((text) => make("td", { textContent: text })));
  });
  const head = make("thead", {}, make("tr", {}, ...HEADS.map((title) => make("th", { scope: "col", textContent: tr(title) }))));
  return make("div", {}, bar, make("table", { className: "story-table" }, head, make("tbody", {}, ...rows)));
}
