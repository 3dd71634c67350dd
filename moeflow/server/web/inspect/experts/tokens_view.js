// One answer of the conversation, its tokens coloured by expert: which answer, which layer, and the layers as a film.

import { requestMessages } from "../../chat/messages.js";
import { setText } from "../../set_text.js";
import { formatNumber, tr } from "../../translate.js";
import { make } from "../elements.js";
import { Routes } from "./routes.js";
import { templateParts } from "./template_parts.js";
import { TokenChoices } from "./token_choices.js";
import { TokenLegend } from "./token_legend.js";
import { TokenText } from "./token_text.js";

const STEP_MS = 700; // from layer to layer
const TITLE_LENGTH = 40; // of a question in the list of answers

export class TokensView {
  /** `ask(path, options)` asks the server; `onExpert(row, expert)`: one was chosen here; `onRoute(cells)`: those of the
   *  chosen token; `onLayer(row)`: this layer is shown now; `announce(text)` is for screen readers. */
  constructor({ ask, chat, onExpert, onRoute, onLayer, announce }) {
    Object.assign(this, { ask, chat, onExpert, onRoute, onLayer });
    this.requestId = null; // of the shown answer
    this.foreign = null; // the id of a request from elsewhere, which is offered too
    this.isWhole = false; // whether nothing new can come
    this.playing = null; // the timer
    this.choices = new TokenChoices();
    const onPick = (token) => this.showChoices(token);
    this.text = new TokenText({ announce, onExpert, onLayer: (row) => this.showLayer(row), onPick });
    this.legend = new TokenLegend((expert) => this.onExpert(this.text.row, expert));
    this.build();
    this.text.element.classList.add("has-numbers"); // some colours are close
    this.answers.addEventListener("change", () => this.choose(this.answers.value));
    this.slider.addEventListener("input", () => this.showLayer(Number(this.slider.value)));
    this.play.addEventListener("click", () => (this.playing ? this.pause() : this.begin()));
    this.numbers.addEventListener("change", () => this.text.element.classList.toggle("has-numbers", this.numbers.checked));
  }

  build() {
    this.answers = make("select", { "aria-label": tr("Answer") });
    this.slider = make("input", { type: "range", min: 0, max: 0, step: 1 });
    this.layer = make("span", { className: "layer-number", "aria-hidden": "true" }); // the slider names it
    this.play = make("button", { type: "button", className: "secondary", textContent: tr("Play") });
    this.numbers = make("input", { type: "checkbox", checked: true });
    this.state = make("p", { className: "hint" });
    const layer = make("label", { className: "layer-slider" }, make("span", { textContent: tr("Layer") }), this.slider, this.layer);
    const numbers = make("label", { className: "check" }, this.numbers, make("span", { textContent: tr("Show numbers") }));
    this.controls = make("div", { className: "token-controls" }, this.answers, layer, this.play, numbers);
    const title = make("h3", { textContent: tr("Tokens coloured by expert") });
    this.element = make("section", {}, title, this.controls, this.state, this.legend.element, this.text.element, this.choices.element);
  }

  /** The turns whose answers the server may know. */
  get turns() {
    return this.chat.turns.filter(({ answer }) => answer?.requestId);
  }

  turnOf(requestId) {
    return this.turns.find(({ answer }) => answer.requestId === requestId);
  }

  /** Show the answer to any request, such as one of the API. */
  open(requestId) {
    this.foreign = this.turnOf(requestId) ? null : requestId;
    this.offerAnswers();
    this.choose(requestId);
  }

  /** Ask for the tokens of the shown answer, anew while it is written. `layers` are the names of the model's layers. */
  async update(layers, signal) {
    this.offerAnswers();
    const { requestId } = this;
    if (!requestId || this.isWhole) return;
    const path = `stats/requests/${encodeURIComponent(requestId)}`;
    let state = this.turnOf(requestId)?.answer.state; // before its tokens are asked for, so that the last ones come, too
    try {
      state ??= (await this.ask(path, { signal })).state;
      const told = await this.ask(`${path}/tokens`, { signal });
      const isOfModel = told.layers.length === layers.length; // others have numbers alone
      if (requestId === this.requestId) this.show(new Routes(isOfModel ? { ...told, layers } : told));
    } catch (error) {
      if (error.status !== 404) throw error;
      if (requestId === this.requestId) this.clear(error.message);
    }
    this.isWhole = requestId === this.requestId && state !== "running";
  }

  /** List the answers that can be shown. A new one of the conversation is shown at once. */
  offerAnswers() {
    const offered = this.turns.map(({ prompt, answer }, i) => [answer.requestId, `${i + 1}. ${prompt.content.slice(0, TITLE_LENGTH)}`]);
    if (this.foreign) offered.push([this.foreign, tr("Request {id}", { id: this.foreign })]);
    const known = [...this.answers.options].map(({ value }) => value);
    if (this.controls.hidden === !offered.length && String(offered.map(([id]) => id)) === String(known)) return;
    this.controls.hidden = !offered.length;
    this.answers.replaceChildren(...offered.map(([value, textContent]) => make("option", { value, textContent })));
    this.choose(this.turns.at(-1)?.answer.requestId ?? this.foreign);
  }

  choose(requestId) {
    this.requestId = requestId;
    this.isWhole = false;
    if (requestId) this.answers.value = requestId;
    this.clear(requestId ? tr("Loading…") : tr("Ask something, and each token of the answer shows its experts here."));
  }

  clear(state) {
    this.text.clear();
    this.choices.hide();
    this.onRoute([]);
    this.onLayer(null);
    this.legend.element.hidden = true;
    setText(this.state, state);
  }

  show(routes) {
    const texts = routes.tokens.filter(({ role }) => role === "prompt").map(({ text }) => text);
    const messages = this.messages();
    this.text.show(routes, messages ? templateParts(texts, messages) : texts.map(() => false));
    this.showAbout();
  }

  /** Show what a token chose in all layers, here and on the map. */
  showChoices(token) {
    const { routes } = this.text;
    this.choices.show(routes, token);
    this.onRoute(routes.cells(token));
  }

  /** The texts that the prompt was made of; null: not known here. */
  messages() {
    const turn = this.turnOf(this.requestId);
    if (!turn) return null;
    const { turns, settings, conversation } = this.chat;
    const { system } = settings.valuesFor(turn.answer, conversation);
    return requestMessages(turns, turn.prompt, system).map(({ content }) => content);
  }

  showLayer(row) {
    this.text.showLayer(row);
    if (this.text.routes) this.showAbout();
  }

  /** Show the controls and texts around the tokens. */
  showAbout() {
    const { routes, row, colours, expert, firstShown } = this.text;
    const layer = routes.layers[row];
    this.slider.max = routes.layers.length - 1;
    this.slider.value = row;
    this.slider.setAttribute("aria-valuetext", tr("Layer {layer}", { layer }));
    setText(this.layer, String(layer));
    this.legend.show(routes, row, colours, expert);
    this.onLayer(row);
    const { numWithout } = routes;
    const parts = [
      routes.topK > 1
        ? tr("A token has the colour of the expert with the largest weight. The line below it is the second expert. The shares count first experts alone.")
        : tr("A token has the colour of its expert."),
      numWithout ? tr("Hatched tokens have no experts: {count}. Point at one for the reason.", { count: formatNumber(numWithout) }) : "",
      firstShown ? tr("The first {count} tokens of the prompt are not shown.", { count: formatNumber(firstShown) }) : "",
    ];
    setText(this.state, parts.filter(Boolean).join(" "));
  }

  /** Highlight the tokens that chose an expert at the layer of this row. Without arguments none is highlighted. */
  highlight(row = this.text.row, expert = null) {
    this.text.highlight(expert);
    this.showLayer(row);
  }

  /** The counts of the shown tokens, if they are of a model with these layers: { tokens, counts }. */
  countsOf(layers) {
    const { routes } = this.text;
    if (String(routes?.layers) !== String(layers)) return { tokens: 0, counts: [] };
    const counts = layers.map((_, row) => routes.counts(row, routes.topK));
    return { tokens: routes.tokens.length - routes.numWithout, counts };
  }

  /** Texts of tokens that chose an expert, with how often, the most frequent first: [[text, count], …]. */
  textsOf(row, expert) {
    return this.text.routes?.textsOf(row, expert) ?? [];
  }

  // ---- playing

  get isLast() {
    return this.text.row >= Number(this.slider.max);
  }

  begin() {
    if (this.isLast) this.showLayer(0);
    setText(this.play, tr("Pause"));
    this.playing = setInterval(() => (this.isLast ? this.pause() : this.showLayer(this.text.row + 1)), STEP_MS);
  }

  pause() {
    clearInterval(this.playing);
    this.playing = null;
    setText(this.play, tr("Play"));
  }
}
