// The experts of the shown layer in their colours, with the share of tokens that chose each first.

import { formatNumber, tr } from "../../translate.js";
import { setStyles } from "../canvas.js";
import { make } from "../elements.js";
import { sum } from "./counts.js";
import { percent } from "./format.js";
import { REST } from "./palette.js";

export class TokenLegend {
  /** `onExpert(expert)`: one was chosen. */
  constructor(onExpert) {
    this.onExpert = onExpert;
    this.element = make("ul", { className: "legend-row", "aria-label": tr("Experts of this layer") });
  }

  /** `colours` are TokenColours for the layer of this row; `chosen` is the highlighted expert, or null. */
  show(routes, row, colours, chosen) {
    const counts = routes.counts(row);
    const seen = routes.counts(row, 2); // a token shows two
    const total = sum(counts);
    const shown = [...colours.places.keys()].filter((expert) => seen[expert]).sort((a, b) => counts[b] - counts[a]);
    const rest = total - sum(shown.map((expert) => counts[expert]));
    const items = shown.map((expert) => this.item(expert, counts[expert], total, colours.of(expert), expert === chosen));
    if (rest) items.push(make("li", {}, swatch(REST), tr("others: {share}", { share: percent(rest / total) })));
    const focused = this.element.contains(document.activeElement) ? document.activeElement.dataset.expert : null;
    this.element.hidden = !total;
    this.element.replaceChildren(...items);
    if (focused) this.element.querySelector(`[data-expert="${focused}"]`)?.focus();
  }

  item(expert, tokens, total, colour, isChosen) {
    const text = tr("expert {expert}: {share}", { expert, share: percent(tokens / total) });
    const title = tr("{tokens} tokens", { tokens: formatNumber(tokens) });
    const attributes = { "aria-pressed": String(isChosen), "data-expert": expert };
    const button = make("button", { type: "button", className: "link", title, ...attributes }, swatch(colour), text);
    button.addEventListener("click", () => this.onExpert(expert));
    return make("li", {}, button);
  }
}

function swatch(colour) {
  const element = make("span", { className: "chip swatch", "aria-hidden": "true" });
  setStyles(element, { "--first": colour });
  return element;
}
