// The looks of the map: tokens relative to even routing, or where experts lie.

import { colours, isDark } from "../canvas.js";
import { formatNumber, tr } from "../../translate.js";
import { sum } from "./counts.js";
import { percent, ratio } from "./format.js";
import { heat, ON_AREA, onHeat } from "./palette.js";
import { letterOf, paintTier, tierName } from "./tiers.js";

/** A description of each cell, for both looks. `seen` is the server's answer, `range` its counts that are shown. */
export function describer({ seen, range, relative }) {
  const { layers, top_k: topK, tiers, residency, hits, misses } = seen;
  return (row, column) => {
    const tokens = range.counts[row]?.[column];
    const all = sum(range.counts[row] ?? []) / topK; // tokens of the layer
    const lines = [tr("Layer {layer}, expert {expert}", { layer: layers[row], expert: column })];
    if (all) {
      const even = percent(topK / seen.num_experts);
      lines.push(tr("{tokens} tokens, {share} of them all", { tokens: formatNumber(tokens), share: percent(tokens / all) }));
      lines.push(tr("{ratio} times even routing ({even})", { ratio: ratio(relative[row][column]), even }));
    }
    if (residency[row]) lines.push(tr("In: {tier}", { tier: tierName(tiers[residency[row][column]]) }));
    if (hits) {
      const times = { hits: formatNumber(hits[row][column]), misses: formatNumber(misses[row][column]) };
      lines.push(tr("{hits} hits, {misses} misses", times));
    }
    return lines;
  };
}

/** Cells by tokens, on a scale from 0 to `top` times even routing. */
export function tokensLook(canvas, { range, relative, top }) {
  const dark = isDark(canvas);
  const { ground, muted } = colours(canvas, "ground", "muted");
  const isIdle = (row, column) => !range.counts[row]?.[column];
  return {
    text: (row, column) =>
      isIdle(row, column)
        ? { text: "0", colour: muted }
        : { text: ratio(relative[row][column]), colour: onHeat(relative[row][column] / top, dark) },
    fill(pen, row, column, { left, top: y, width, height }) {
      pen.fillStyle = isIdle(row, column) ? ground : heat(relative[row][column] / top, dark);
      pen.fillRect(left, y, width, height);
    },
  };
}

/** Cells by the place where the expert lies. */
export function tiersLook({ tiers, residency }) {
  const tierOf = (row, column) => tiers[residency[row]?.[column]];
  return {
    text: (row, column) => ({ text: letterOf(tierOf(row, column)), colour: ON_AREA }),
    fill: (pen, row, column, box) => paintTier(pen, tierOf(row, column), box),
  };
}
