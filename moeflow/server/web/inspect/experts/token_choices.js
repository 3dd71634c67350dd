// The experts that one token chose in every layer.

import { setText } from "../../set_text.js";
import { visible } from "../../token_tree_dot.js";
import { tr } from "../../translate.js";
import { make } from "../elements.js";

export class TokenChoices {
  constructor() {
    this.title = make("h4");
    this.list = make("ul");
    this.element = make("section", { className: "token-choices", hidden: true }, this.title, this.list);
  }

  /** `routes` are those of all tokens; `token` is the number of the chosen one. */
  show(routes, token) {
    setText(this.title, tr("Token “{text}”", { text: visible(routes.tokens[token].text) }));
    const rows = routes.layers.map((layer, row) => [layer, routes.chosen(token, row)]).filter(([, experts]) => experts.length);
    const texts = rows.map(([layer, experts]) => tr("Layer {layer}: experts {experts}", { layer, experts: experts.join(", ") }));
    this.list.replaceChildren(...(texts.length ? texts : [routes.reason(token)]).map((textContent) => make("li", { textContent })));
    this.element.hidden = false;
  }

  hide() {
    this.element.hidden = true;
  }
}
