// Where experts lie: names, colours, letters and patterns of the tiers that the server names.

import { textKey, tr } from "../../translate.js";
import { setStyles } from "../canvas.js";
import { make } from "../elements.js";

const TIERS = {
  gpu: { name: textKey("GPU"), letter: "G", colour: "#ee8866" },
  ram: { name: textKey("main memory"), letter: "R", colour: "#77aadd" },
  slot: { name: textKey("a slot of main memory"), letter: "S", colour: "#44bb99" },
  disk: { name: textKey("disk"), letter: "D", colour: "#b5bcba" },
  "other machine": { name: textKey("another machine"), letter: "M", colour: "#eedd88" },
};
const MARK = "#111111";
const LEAST_PX = 6; // of a cell with a pattern

export const tierName = (tier) => tr(TIERS[tier].name);

export const letterOf = (tier) => TIERS[tier].letter;

/** Fill a box. Patterns distinguish tiers without colours in cells that are too small for letters. */
export function paintTier(pen, tier, { left, top, width, height }) {
  pen.fillStyle = TIERS[tier].colour;
  pen.fillRect(left, top, width, height);
  if (width < LEAST_PX || height < LEAST_PX || width >= 26) return;
  pen.fillStyle = pen.strokeStyle = MARK;
  const [x, y] = [left + width / 2, top + height / 2];
  if (tier === "gpu") pen.fillRect(x - 1.5, y - 1.5, 3, 3);
  else if (tier === "slot") pen.fillRect(left, y - 0.5, width, 1);
  else if (tier === "disk") diagonal(pen, left, top, width, height);
  else if (tier === "other machine") pen.fillRect(x - 0.5, top, 1, height);
}

function diagonal(pen, left, top, width, height) {
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(left, top + height);
  pen.lineTo(left + width, top);
  pen.stroke();
}

/** How many experts each tier holds: [[tier, count], …], without empty tiers. */
export function tierTotals({ tiers, residency }) {
  const totals = tiers.map(() => 0);
  for (const tier of residency.flat()) totals[tier] += 1;
  return tiers.map((tier, i) => [tier, totals[i]]).filter(([, total]) => total);
}

/** The letters and colours of the tiers. */
export class TierLegend {
  constructor() {
    this.element = make("ul", { className: "legend-row", "aria-label": tr("Places of experts") });
    this.shown = ""; // the tiers
  }

  show(seen) {
    const tiers = tierTotals(seen).map(([tier]) => tier);
    if (String(tiers) === this.shown) return;
    this.shown = String(tiers);
    this.element.replaceChildren(...tiers.map(legendItem));
  }
}

function legendItem(tier) {
  const swatch = make("span", { className: "chip swatch", "aria-hidden": "true", textContent: letterOf(tier) });
  setStyles(swatch, { background: TIERS[tier].colour });
  return make("li", {}, swatch, tierName(tier));
}
