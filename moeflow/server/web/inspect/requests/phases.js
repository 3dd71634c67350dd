// Where the time of a request went: one bar, and the same as a table.

import { tr } from "../../translate.js";
import { setStyles } from "../canvas.js";
import { make } from "../elements.js";
import { percent, seconds } from "./format.js";

const NAMES = {
  received: "Received and admitted",
  tokenized: "Text to tokens",
  queued: "In the queue",
  waiting: "Queue or prompt",
  prompt: "Prompt",
  decode: "Answer",
  sent: "Sent to the client",
};
const HEADS = ["Phase", "From", "Took", "Share"];

/** `story` is a request's, of the server. */
export function phasesElement({ phases, total_s: totalS }) {
  const share = (phase) => (totalS ? phase.duration_s / totalS : 0);
  const label = phases.map((phase) => `${tr(NAMES[phase.name])} ${percent(share(phase))}`).join(", ");
  const bar = make("div", { className: "phase-bar", role: "img", "aria-label": label });
  for (const phase of phases) {
    const part = make("span", { title: `${tr(NAMES[phase.name])}: ${seconds(phase.duration_s)}`, "data-phase": phase.name });
    setStyles(part, { "flex-grow": String(phase.duration_s) });
    bar.append(part);
  }
  const rows = phases.map((phase) => {
    const name = make("th", { scope: "row" }, make("span", { className: "phase-mark", "data-phase": phase.name }), tr(NAMES[phase.name]));
    const texts = [seconds(phase.start_s), seconds(phase.duration_s), percent(share(phase))];
    return make("tr", {}, name, ...texts.map((text) => make("td", { textContent: text })));
  });
  const head = make("thead", {}, make("tr", {}, ...HEADS.map((text) => make("th", { scope: "col", textContent: tr(text) }))));
  return make("div", {}, bar, make("table", { className: "story-table" }, head, make("tbody", {}, ...rows)));
}
