// The tokens of one answer and its prompt as a text, each in the colour of the expert that it chose first at one layer.
// Arrow keys go from token to token and from layer to layer.

import { visible } from "../../token_tree_dot.js";
import { tr } from "../../translate.js";
import { setStyles } from "../canvas.js";
import { make } from "../elements.js";
import { Tooltip } from "../tooltip.js";
import { TokenColours } from "./token_colours.js";

const MOST_PROMPT = 1500; // tokens of a prompt that are shown: the last

export class TokenText {
  /** `onLayer(row)`: keys ask for another layer; `onExpert(row, expert)`: one was chosen; `onPick(token)`: a token was;
   *  `announce(text)` is for screen readers. */
  constructor({ onLayer, onExpert, onPick, announce }) {
    Object.assign(this, { onLayer, onExpert, onPick, announce });
    this.element = make("div", { className: "tokens", role: "listbox", tabIndex: 0, dir: "auto", "aria-label": tr("Tokens") });
    this.colours = new TokenColours();
    this.tooltip = new Tooltip();
    this.expert = null; // to highlight
    this.row = 0; // of the shown layer
    this.clear();
    this.listen();
  }

  listen() {
    const { element } = this;
    element.addEventListener("pointermove", (event) => this.tellAt(event));
    element.addEventListener("pointerleave", () => this.tooltip.leave());
    element.addEventListener("blur", () => this.tooltip.hide());
    element.addEventListener("click", (event) => {
      this.pick(tokenOf(event.target));
      this.tellAt(event); // a finger has left it by now
    });
    element.addEventListener("keydown", (event) => this.step(event));
  }

  clear() {
    this.routes = null;
    this.token = null; // the chosen one
    this.firstShown = 0; // the token of the first element
    this.tooltip.hide();
    this.element.hidden = true;
    this.element.replaceChildren();
    this.element.removeAttribute("aria-activedescendant");
    this.colours.reset();
  }

  /** Show tokens; only new ones are drawn. `isTemplate` has a value for each token of the prompt. */
  show(routes, isTemplate) {
    const numKnown = this.routes?.tokens.length ?? 0;
    this.routes = routes;
    if (!numKnown) this.firstShown = Math.max(0, isTemplate.length - MOST_PROMPT);
    this.row = Math.min(this.row, routes.layers.length - 1);
    const first = Math.max(numKnown, this.firstShown);
    const added = routes.tokens.slice(first).map((token, i) => tokenElement(first + i, token, isTemplate[first + i]));
    this.element.append(...added);
    this.element.hidden = !routes.tokens.length;
    const isRecoloured = this.colours.update(routes.counts(this.row));
    this.paint(isRecoloured ? 0 : numKnown - 1); // the last one had not been computed
  }

  showLayer(row) {
    this.row = row;
    if (!this.routes) return;
    this.colours.reset();
    this.colours.update(this.routes.counts(row));
    this.paint(0);
  }

  /** Highlight the tokens that chose an expert at the shown layer; null: none. */
  highlight(expert) {
    this.expert = expert;
    if (this.routes) this.paint(0);
  }

  /** Colour tokens from this one on. */
  paint(first) {
    for (const element of [...this.element.children].slice(Math.max(0, first - this.firstShown))) {
      const chosen = this.routes.chosen(tokenOf(element), this.row);
      const [first = "transparent", second = first] = chosen.map((expert) => this.colours.of(expert));
      setStyles(element, { "--first": first, "--second": second });
      element.dataset.expert = chosen[0] ?? "";
      element.classList.toggle("is-without", !chosen.length);
      element.classList.toggle("is-chosen", chosen.includes(this.expert));
    }
  }

  elementOf(token) {
    return this.element.children[token - this.firstShown];
  }

  /** What a person should know about a token. */
  lines(token) {
    const { tokens, layers } = this.routes;
    const name = tr("Token “{text}”", { text: visible(tokens[token].text) });
    const chosen = this.routes.chosen(token, this.row);
    if (!chosen.length) return [name, this.routes.reason(token)];
    return [name, tr("Layer {layer}: experts {experts}", { layer: layers[this.row], experts: chosen.join(", ") })];
  }

  tellAt({ target, clientX: x, clientY: y }) {
    this.tell(tokenOf(target), { x, y });
  }

  tell(token, place, options) {
    if (token === null) this.tooltip.hide();
    else this.tooltip.show(this.lines(token), place, this.element, options);
  }

  pick(token) {
    if (token === null) return;
    if (this.token !== null) this.elementOf(this.token).setAttribute("aria-selected", "false");
    this.token = token;
    const element = this.elementOf(token);
    element.setAttribute("aria-selected", "true");
    element.scrollIntoView({ block: "nearest" });
    this.element.setAttribute("aria-activedescendant", element.id);
    this.onPick(token);
  }

  step(event) {
    const at = this.token ?? this.firstShown - 1;
    const last = this.routes.tokens.length - 1;
    const tokens = { ArrowRight: Math.min(last, at + 1), ArrowLeft: Math.max(this.firstShown, at - 1), Home: this.firstShown, End: last };
    const layers = { ArrowUp: this.row + 1, ArrowDown: this.row - 1 };
    if (event.key in tokens) this.pick(tokens[event.key]);
    else if (event.key in layers) this.onLayer(Math.min(Math.max(0, layers[event.key]), this.routes.layers.length - 1));
    else if (event.key === "Enter" && this.token !== null) this.pickExpert();
    else return;
    event.preventDefault();
    if (this.token !== null) this.tellPicked();
  }

  pickExpert() {
    const [expert] = this.routes.chosen(this.token, this.row);
    if (expert !== undefined) this.onExpert(this.row, expert);
  }

  tellPicked() {
    const { left, bottom } = this.elementOf(this.token).getBoundingClientRect();
    this.tell(this.token, { x: left, y: bottom }, { isByKeys: true });
    this.announce(this.lines(this.token).join(", "));
  }
}

/** The token of an element, or null. */
function tokenOf(element) {
  const { token } = element.dataset;
  return token === undefined ? null : Number(token);
}

function tokenElement(token, { text, role }, isTemplate) {
  const element = make("span", { className: "chip", id: `token-${token}`, role: "option", "aria-selected": "false" });
  element.textContent = text.replaceAll("\n", "↵\n");
  element.dataset.token = token;
  if (!text.trim()) element.setAttribute("aria-label", visible(text) || tr("no text"));
  element.classList.toggle("is-prompt", role === "prompt");
  element.classList.toggle("is-template", Boolean(isTemplate));
  return element;
}
