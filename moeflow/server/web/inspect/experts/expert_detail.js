// One expert: its numbers, its share over time, and the tokens of the shown answer that chose it.

import { listFacts, NONE } from "../../facts.js";
import { setText } from "../../set_text.js";
import { visible } from "../../token_tree_dot.js";
import { formatNumber, tr } from "../../translate.js";
import { make } from "../elements.js";
import { sum } from "./counts.js";
import { percent, ratio } from "./format.js";
import { ShareChart } from "./share_chart.js";
import { tierName } from "./tiers.js";

const MOST_TEXTS = 60;

export class ExpertDetail {
  /** `onClose()` is called when the user closes it. */
  constructor(onClose) {
    this.title = make("h3", { tabIndex: -1 });
    this.facts = make("dl", { className: "facts" });
    this.chart = new ShareChart();
    this.texts = make("ul", { className: "expert-tokens" });
    this.shownTexts = "";
    this.textsHead = make("p", { className: "hint" });
    const close = make("button", { type: "button", className: "quiet", textContent: tr("Close") });
    close.addEventListener("click", onClose);
    const head = make("div", { className: "detail-head" }, this.title, close);
    const numbers = make("div", { className: "detail-numbers" }, this.facts, this.chart.element);
    this.element = make("section", { className: "expert-detail", hidden: true }, head, numbers);
    this.element.append(this.textsHead, this.texts);
  }

  hide() {
    this.element.hidden = true;
  }

  /** `texts` are [[text, count], …] of the shown answer; `points` as of Samples. */
  show({ seen, range, relative, row, expert, points, texts }) {
    this.element.hidden = false;
    setText(this.title, tr("Layer {layer}, expert {expert}", { layer: seen.layers[row], expert }));
    const even = seen.top_k / seen.num_experts;
    const times = { ratio: ratio(relative[row]?.[expert] ?? 0), even: percent(even) };
    listFacts(this.facts, [
      [tr("Tokens"), tokensText(range.counts[row], expert, seen.top_k)],
      [tr("Relative to even routing"), tr("{ratio} times ({even} is even)", times)],
      [tr("Last minute"), tokensText(seen.last_minute.counts[row], expert, seen.top_k)],
      [tr("Lies in"), tierName(seen.tiers[seen.residency[row][expert]])],
      ...(seen.hits ? [[tr("Hits and misses"), `${formatNumber(seen.hits[row][expert])} · ${formatNumber(seen.misses[row][expert])}`]] : []),
    ]);
    this.chart.show(points, even);
    this.showTexts(texts);
  }

  showTexts(texts) {
    const shown = JSON.stringify(texts);
    if (shown === this.shownTexts) return; // marked text stays marked
    this.shownTexts = shown;
    setText(this.textsHead, texts.length ? tr("Tokens of the shown answer that chose it:") : tr("No token of the shown answer chose it."));
    const items = texts.slice(0, MOST_TEXTS).map(([text, times]) => (times > 1 ? `${visible(text)} ×${times}` : visible(text)));
    const more = texts.length - MOST_TEXTS;
    if (more > 0) items.push(tr("and {count} more", { count: formatNumber(more) }));
    this.texts.replaceChildren(...items.map((textContent) => make("li", { textContent })));
  }
}

/** How many of a layer's tokens chose an expert. */
function tokensText(row, expert, topK) {
  const all = sum(row ?? []) / topK;
  if (!all) return NONE;
  return tr("{tokens} of {all}: {share}", { tokens: formatNumber(row[expert]), all: formatNumber(all), share: percent(row[expert] / all) });
}
