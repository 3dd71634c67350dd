// The text of an answer and its prompt, each token in the colour of the expert that it chose first at one layer.

import { requestMessages } from "../../chat/messages.js";
import { setText } from "../../set_text.js";
import { visible } from "../../token_tree_dot.js";
import { tr } from "../../translate.js";
import { make } from "../elements.js";
import { Tooltip } from "../tooltip.js";
import { count, percent } from "./format.js";
import { Routes } from "./routes.js";
import { templateParts } from "./template_parts.js";
import { TokenColours } from "./token_colours.js";

const STEP_MS = 700; // from layer to layer
const MOST_PROMPT = 1500; // tokens of a prompt that are shown: the last

export class TokensView {
  /** `ask(path, options)` asks the server; `onExpert(row, expert)`: one was chosen here; `onRoute(cells)`: those of the
   *  chosen token; `announce(text)` is for screen readers. */
  constructor({ ask, chat, onExpert, onRoute, announce }) {
    Object.assign(this, { ask, chat, onExpert, onRoute, announce });
    this.colours = new TokenColours();
    this.tooltip = new Tooltip();
    this.turn = null; // the shown one
    this.routes = null; // its tokens
    this.isWhole = false; // whether nothing new can come
    this.firstShown = 0; // the token of the first element
    this.row = 0; // of the shown layer
    this.expert = null; // to highlight
    this.token = null; // the chosen one
    this.playing = null; // the timer
    this.build();
    this.listen();
  }

  build() {
    this.answers = make("select", { "aria-label": tr("Answer") });
    this.slider = make("input", { type: "range", min: 0, max: 0, step: 1, id: "token-layer" });
    this.layer = make("output", { className: "layer-number" });
    this.layer.htmlFor.add(this.slider.id);
    this.play = make("button", { type: "button", className: "secondary", textContent: tr("Play") });
    this.numbers = make("input", { type: "checkbox" });
    this.legend = make("ul", { className: "token-legend", "aria-label": tr("Experts of this layer") });
    this.text = make("div", { className: "tokens", role: "listbox", tabIndex: 0, dir: "auto", "aria-label": tr("Tokens") });
    this.state = make("p", { className: "hint" });
    this.controls = make(
      "div",
      { className: "token-controls" },
      this.answers,
      make("label", { className: "layer-slider" }, make("span", { textContent: tr("Layer") }), this.slider, this.layer),
      this.play,
      make("label", { className: "check" }, this.numbers, make("span", { textContent: tr("Show numbers") })),
    );
    this.element = make(
      "section",
      { className: "token-section" },
      make("h3", { textContent: tr("Tokens coloured by expert") }),
      this.controls,
      this.state,
      this.legend,
      this.text,
    );
    this.clear();
  }

  listen() {
    const { text } = this;
    this.answers.addEventListener("change", () => this.choose(this.turnOf(this.answers.value)));
    this.slider.addEventListener("input", () => this.showLayer(Number(this.slider.value)));
    this.play.addEventListener("click", () => (this.playing ? this.pause() : this.begin()));
    this.numbers.addEventListener("change", () => text.classList.toggle("has-numbers", this.numbers.checked));
    text.addEventListener("pointerover", ({ target, clientX: x, clientY: y }) => this.tell(numberOf(target), { x, y }));
    text.addEventListener("pointerleave", () => this.tooltip.hide());
    text.addEventListener("blur", () => this.tooltip.hide());
    text.addEventListener("click", ({ target }) => this.pick(numberOf(target)));
    text.addEventListener("keydown", (event) => this.step(event));
  }

  // ---- data

  /** Show another answer of the conversation; ask anew for one that is still written. */
  async update(signal) {
    this.offerAnswers();
    const { turn } = this;
    if (!turn || this.isWhole) return;
    const { requestId, state } = turn.answer;
    const wasRunning = state === "running";
    try {
      const told = await this.ask(`stats/requests/${encodeURIComponent(requestId)}/tokens`, { signal });
      if (turn !== this.turn) return;
      this.show(new Routes(told));
      this.isWhole = !wasRunning;
    } catch (error) {
      if (error.status !== 404) throw error;
      this.isWhole = !wasRunning;
      this.clear(tr("The server does not keep the tokens of this answer any more. Ask again to see them."));
    }
  }

  /** List the answers of the conversation; go on with the last where a new one has come. */
  offerAnswers() {
    const turns = this.chat.turns.filter(({ answer }) => answer?.requestId);
    const ids = turns.map(({ answer }) => answer.requestId);
    const known = [...this.answers.options].map(({ value }) => value);
    if (String(ids) !== String(known)) {
      this.answers.replaceChildren(...turns.map(({ prompt, answer }, i) => make("option", { value: answer.requestId, textContent: `${i + 1}. ${prompt.content.slice(0, 40)}` })));
      this.choose(turns.at(-1) ?? null);
    }
    this.controls.hidden = !turns.length;
    if (!turns.length) this.clear(tr("Ask something, and each token of the answer shows its experts here."));
  }

  turnOf(requestId) {
    return this.chat.turns.find(({ answer }) => answer?.requestId === requestId) ?? null;
  }

  choose(turn) {
    this.turn = turn;
    this.isWhole = false;
    if (turn) this.answers.value = turn.answer.requestId;
    this.clear(turn ? tr("Loading…") : "");
  }

  clear(state = "") {
    this.routes = null;
    this.token = null;
    this.text.hidden = this.legend.hidden = true;
    this.text.replaceChildren();
    this.legend.replaceChildren();
    this.colours.reset();
    setText(this.state, state);
  }

  // ---- drawing

  /** Show tokens, drawing only those that are new. */
  show(routes) {
    const numDrawn = this.routes ? this.firstShown + this.text.children.length : 0;
    const isNew = !this.routes;
    this.routes = routes;
    if (isNew) {
      const numPrompt = routes.tokens.filter(({ role }) => role === "prompt").length;
      this.firstShown = Math.max(0, numPrompt - MOST_PROMPT);
      this.slider.max = Math.max(0, routes.layers.length - 1);
      this.row = Math.min(this.row, this.slider.max);
    }
    const first = Math.max(numDrawn, this.firstShown);
    const isTemplate = this.templateTokens();
    this.text.append(...routes.tokens.slice(first).map(({ text, role }, i) => tokenElement(first + i, text, role, isTemplate[first + i])));
    this.text.hidden = !routes.tokens.length;
    const isRecoloured = this.colours.update(routes.firstCounts(this.row));
    this.paint(isNew || isRecoloured ? this.firstShown : Math.max(this.firstShown, numDrawn - 1)); // the last one is computed late
    this.showLegend();
    this.sayState();
  }

  templateTokens() {
    const { settings, turns } = this.chat;
    const messages = requestMessages(turns, this.turn.prompt, settings.systemPrompt).map(({ content }) => content);
    return templateParts(this.routes.tokens.filter(({ role }) => role === "prompt").map(({ text }) => text), messages);
  }

  showLayer(row) {
    if (!this.routes) return;
    this.row = row;
    this.slider.value = row;
    this.colours.reset();
    this.colours.update(this.routes.firstCounts(row));
    this.paint(this.firstShown);
    this.showLegend();
    this.sayState();
  }

  /** Colour tokens from this one on. */
  paint(first) {
    for (const element of [...this.text.children].slice(first - this.firstShown)) {
      const [expert, second] = this.routes.chosen(numberOf(element), this.row);
      const isCounted = expert !== undefined;
      element.dataset.first = isCounted ? this.colours.of(expert) : "none";
      element.dataset.second = second === undefined ? "none" : this.colours.of(second);
      element.dataset.expert = isCounted ? expert : "";
      element.classList.toggle("is-chosen", this.isHighlighted(numberOf(element)));
    }
  }

  isHighlighted(token) {
    return this.expert !== null && this.routes.chosen(token, this.row).includes(this.expert);
  }

  showLegend() {
    const counts = this.routes.firstCounts(this.row);
    const total = counts.reduce((all, one) => all + one, 0);
    const shown = [...this.colours.places.keys()].filter((expert) => counts[expert]).sort((a, b) => counts[b] - counts[a]);
    const rest = total - shown.reduce((all, expert) => all + counts[expert], 0);
    this.legend.hidden = !total;
    this.legend.replaceChildren(
      ...shown.map((expert) => this.legendItem(expert, counts[expert], total)),
      ...(rest ? [make("li", {}, swatch("rest"), tr("others: {share}", { share: percent(rest / total) }))] : []),
    );
    setText(this.layer, String(this.routes.layers[this.row] ?? ""));
    this.slider.setAttribute("aria-valuetext", tr("Layer {layer}", { layer: this.routes.layers[this.row] }));
  }

  legendItem(expert, tokens, total) {
    const button = make("button", { type: "button", className: "link", title: tr("{tokens} tokens", { tokens: count(tokens) }) }, swatch(this.colours.of(expert)), tr("expert {expert}: {share}", { expert, share: percent(tokens / total) }));
    button.setAttribute("aria-pressed", String(expert === this.expert));
    button.addEventListener("click", () => this.onExpert(this.row, expert));
    return make("li", {}, button);
  }

  sayState() {
    const { tokens, topK } = this.routes;
    const numMissing = tokens.filter((_, i) => this.isMissing(i)).length;
    const parts = [
      topK > 1
        ? tr("A token has the colour of the expert with the largest weight. The line below it is the second expert.")
        : tr("A token has the colour of its expert."),
      numMissing ? tr("{count} hatched tokens were not computed for this answer: point at one for the reason.", { count: count(numMissing) }) : "",
      this.firstShown ? tr("The first {count} tokens of the prompt are not shown.", { count: count(this.firstShown) }) : "",
    ];
    setText(this.state, parts.filter(Boolean).join(" "));
  }

  /** Whether a token has no experts, though it is not the one that was chosen last. */
  isMissing(token) {
    return !this.routes.tokens[token].experts;
  }

  /** Why a token has no experts. */
  reason(token) {
    const { tokens } = this.routes;
    if (token === tokens.length - 1) return tr("The last token is not computed: nothing follows it.");
    const firstCounted = tokens.findIndex(({ experts }) => experts);
    if (firstCounted < 0 || token > firstCounted) return tr("Not counted: nobody was watching then.");
    return tr("Not computed: found in the prefix cache, or before counting began.");
  }

  // ---- one token, one expert

  lines(token) {
    const { text } = this.routes.tokens[token];
    const chosen = this.routes.chosen(token, this.row);
    const name = tr("Token “{text}”", { text: visible(text) });
    if (!chosen.length) return [name, this.reason(token)];
    const layer = this.routes.layers[this.row];
    return [name, tr("Layer {layer}: experts {experts}", { layer, experts: chosen.join(", ") })];
  }

  tell(token, place) {
    if (token === null || !this.routes?.tokens[token]) this.tooltip.hide();
    else this.tooltip.show(this.lines(token), place, this.text);
  }

  /** Choose a token: its route through all layers is marked. */
  pick(token) {
    if (token === null) return;
    this.text.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    this.token = token;
    const element = this.text.children[token - this.firstShown];
    element.setAttribute("aria-selected", "true");
    this.text.setAttribute("aria-activedescendant", element.id);
    element.scrollIntoView({ block: "nearest" });
    this.onRoute(this.routes.layers.flatMap((_, row) => this.routes.chosen(token, row).map((expert) => [row, expert])));
  }

  step(event) {
    if (!this.routes) return;
    const last = this.routes.tokens.length - 1;
    const at = this.token ?? this.firstShown - 1;
    const targets = { ArrowRight: Math.min(last, at + 1), ArrowLeft: Math.max(this.firstShown, at - 1), Home: this.firstShown, End: last };
    const layers = { ArrowUp: 1, ArrowDown: -1 };
    if (event.key in targets) this.pick(targets[event.key]);
    else if (event.key in layers) this.showLayer(Math.min(Math.max(0, this.row + layers[event.key]), this.routes.layers.length - 1));
    else if (event.key === "Enter" && this.token !== null) this.pickExpert();
    else return;
    event.preventDefault();
    this.tellChosen();
  }

  tellChosen() {
    if (this.token === null) return;
    const { left, bottom } = this.text.children[this.token - this.firstShown].getBoundingClientRect();
    this.tell(this.token, { x: left, y: bottom });
    this.announce(this.lines(this.token).join(", "));
  }

  pickExpert() {
    const [expert] = this.routes.chosen(this.token, this.row);
    if (expert !== undefined) this.onExpert(this.row, expert);
  }

  /** Highlight the tokens that chose an expert at the layer of this row; null: none. */
  highlight(row, expert) {
    this.expert = expert;
    this.showLayer(row ?? this.row);
  }

  /** Texts of tokens that chose an expert, with how often, the most frequent first: [[text, count], …]. */
  textsOf(row, expert) {
    const counts = new Map();
    for (const [i, { text }] of (this.routes?.tokens ?? []).entries()) {
      if (this.routes.chosen(i, row).includes(expert)) counts.set(text, (counts.get(text) ?? 0) + 1);
    }
    return [...counts].sort(([, one], [, other]) => other - one);
  }

  // ---- playing

  begin() {
    if (this.row >= Number(this.slider.max)) this.showLayer(0);
    setText(this.play, tr("Pause"));
    this.playing = setInterval(() => {
      if (this.row >= Number(this.slider.max)) this.pause();
      else this.showLayer(this.row + 1);
    }, STEP_MS);
  }

  pause() {
    clearInterval(this.playing);
    this.playing = null;
    setText(this.play, tr("Play"));
  }
}

/** The token of an element, or null. */
function numberOf(element) {
  const { token } = element.dataset ?? {};
  return token === undefined ? null : Number(token);
}

function tokenElement(token, text, role, isTemplate) {
  const element = make("span", { className: "chip", id: `token-${token}`, role: "option", textContent: text.replaceAll("\n", "↵\n") });
  element.dataset.token = token;
  element.setAttribute("aria-selected", "false");
  if (!text.trim()) element.setAttribute("aria-label", visible(text));
  element.classList.toggle("is-prompt", role === "prompt");
  element.classList.toggle("is-template", Boolean(isTemplate));
  return element;
}

const swatch = (place) => {
  const element = make("span", { className: "chip swatch", "aria-hidden": "true" });
  element.dataset.first = place;
  return element;
};
