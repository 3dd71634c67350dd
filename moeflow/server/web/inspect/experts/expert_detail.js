// One expert: its numbers, its share over time, and the tokens of the shown answer that chose it.

import { listFacts } from "../../facts.js";
import { visible } from "../../token_tree_dot.js";
import { tr } from "../../translate.js";
import { make } from "../elements.js";
import { count, percent, ratio } from "./format.js";
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
    this.textsHead = make("p", { className: "hint" });
    const close = make("button", { type: "button", className: "quiet", textContent: tr("Close") });
    close.addEventListener("click", onClose);
    const head = make("div", { className: "detail-head" }, this.title, close);
    const numbers = make("div", { className: "detail-numbers" }, this.facts, this.chart.element);
    this.element = make("section", { className: "expert-detail", hidden: true }, head, numbers, this.textsHead, this.texts);
  }

  hide() {
    this.element.hidden = true;
  }

  /** `texts` are [[text, count], …] of the shown answer; `points` as of Samples. */
  show({ seen, range, relative, row, expert, points, texts }) {
    const even = seen.top_k / seen.num_experts;
    const minute = seen.last_minute;
    this.element.hidden = false;
    this.title.textContent = tr("Layer {layer}, expert {expert}", { layer: seen.layers[row], expert });
    const tokens = range.counts[row]?.[expert] ?? 0;
    listFacts(this.facts, [
      [tr("Tokens"), range.tokens ? tr("{tokens} of {all}: {share}", { tokens: count(tokens), all: count(range.tokens), share: percent(tokens / range.tokens) }) : count(tokens)],
      [tr("Relative to even routing"), tr("{ratio} times ({even} is even)", { ratio: ratio(relative[row]?.[expert] ?? 0), even: percent(even) })],
      ...(minute.tokens ? [[tr("Last minute"), percent(minute.counts[row][expert] / minute.tokens)]] : []),
      [tr("Lies in"), tierName(seen.tiers[seen.residency[row][expert]])],
      ...(seen.hits && seen.misses ? [[tr("Hits and misses"), `${count(seen.hits[row][expert])} · ${count(seen.misses[row][expert])}`]] : []),
    ]);
    this.chart.show(points, even);
    this.showTexts(texts);
  }

  showTexts(texts) {
    this.textsHead.textContent = texts.length ? tr("Tokens of the shown answer that chose it:") : tr("No token of the shown answer chose it.");
    const more = texts.length - MOST_TEXTS;
    this.texts.replaceChildren(
      ...texts.slice(0, MOST_TEXTS).map(([text, times]) => make("li", { textContent: times > 1 ? `${visible(text)} ×${times}` : visible(text) })),
      ...(more > 0 ? [make("li", { className: "muted", textContent: tr("and {count} more", { count: count(more) }) })] : []),
    );
  }
}
