// The tokens of an answer, shaded by the probability that the model gave each. A token that is pointed at, or walked to
// by arrow keys, shows the others that were likely in its place.

import { setText } from "../set_text.js";
import { visible } from "../token_tree_dot.js";
import { formatNumber, formatPercent, tr } from "../translate.js";
import { shownPiece, TokenReader } from "./token_record.js";

const LEAST = [0.9, 0.6, 0.3, 0.1, 0]; // probabilities of the shades, from the surest on
const NUM_UNSURE = 20; // tokens that the buttons lead to
const PAGE = 10; // tokens
const GAP_PX = 4; // between a token and its card
let numViews = 0;

export class ProbabilitiesView {
  /** `element` is the part of the turn with the tokens, `button` shows it in the place of `text`. */
  constructor(element, button, text) {
    Object.assign(this, { element, button, text });
    const part = (name) => element.querySelector(`.${name}`);
    this.line = part("probabilities-line");
    this.list = part("token-list");
    this.card = part("token-card");
    this.steps = part("unsure");
    this.place = this.steps.querySelector(".place");
    this.isOn = false;
    numViews += 1;
    this.activeId = `active-token-${numViews}`;
    part("probability-legend").replaceChildren(...LEAST.map(legendItem));
    this.show(null);
    this.listen();
  }

  listen() {
    const [back, forth] = this.steps.querySelectorAll("button");
    this.button.addEventListener("click", () => {
      this.isOn = !this.isOn;
      this.draw();
    });
    back.addEventListener("click", () => this.stepUnsure(-1));
    forth.addEventListener("click", () => this.stepUnsure(1));
    this.list.addEventListener("pointerover", ({ target }) => this.point(target));
    this.list.addEventListener("pointerleave", () => this.hover(null));
    this.list.addEventListener("click", ({ target }) => this.point(target, { isChosen: true }));
    this.list.addEventListener("focus", () => this.activate(Math.max(0, this.active)));
    this.list.addEventListener("blur", () => this.hideCard());
    this.list.addEventListener("keydown", (event) => this.press(event));
  }

  /** Show the tokens of an answer, `record` of token_record.js, or null; more of it may come. */
  update(record) {
    if (record !== this.record) this.show(record);
    this.draw();
  }

  show(record) {
    this.record = record;
    this.reader = record && new TokenReader(record);
    this.tokens = [];
    this.active = -1; // the token that keys have led to
    this.unsure = null; // places of the least sure tokens; null: not known
    this.step = -1; // among them, where the buttons led to
    this.list.replaceChildren();
    this.list.removeAttribute("aria-activedescendant");
    this.hideCard();
  }

  /** Draw new tokens. What is not shown is not drawn. */
  draw() {
    const isShown = this.isOn && Boolean(this.record);
    this.button.hidden = !this.record;
    this.button.setAttribute("aria-pressed", String(isShown));
    this.element.hidden = !isShown;
    this.text.hidden = isShown;
    if (!isShown) return;
    const added = this.reader.read();
    if (!added.length) return;
    this.tokens.push(...added);
    this.list.append(...added.map(tokenElement));
    this.unsure = null;
    setText(this.place, "");
    setText(this.line, lineOf(this.tokens, this.record.isPart));
  }

  // ---- one token

  point(target, { isChosen = false } = {}) {
    const place = [...this.list.children].indexOf(target);
    if (place < 0) return;
    if (isChosen) this.activate(place);
    else this.hover(place);
  }

  /** Show the card of a token without going there; null shows that of the active one again. */
  hover(place) {
    const shown = place ?? (document.activeElement === this.list ? this.active : -1);
    if (shown >= 0) this.showCard(shown);
    else this.hideCard();
  }

  activate(place) {
    if (!this.tokens[place]) return;
    const before = this.list.children[this.active];
    before?.removeAttribute("id");
    before?.setAttribute("aria-selected", "false");
    this.active = place;
    const now = this.list.children[place];
    now.id = this.activeId;
    now.setAttribute("aria-selected", "true");
    this.list.setAttribute("aria-activedescendant", now.id);
    this.showCard(place);
  }

  press(event) {
    if (event.key === "Escape" && !this.card.hidden) {
      event.preventDefault();
      this.hideCard();
      return;
    }
    const { active } = this;
    const last = this.tokens.length - 1;
    const moves = { ArrowRight: active + 1, ArrowDown: active + 1, ArrowLeft: active - 1, ArrowUp: active - 1, PageDown: active + PAGE, PageUp: active - PAGE, Home: 0, End: last };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.go(Math.min(last, Math.max(0, moves[event.key])));
  }

  go(place) {
    this.activate(place);
    this.list.children[place].scrollIntoView({ block: "nearest" });
  }

  /** Go to the least sure token, then to the next least sure, and so on. */
  stepUnsure(by) {
    this.unsure ??= unsurePlaces(this.tokens);
    const { unsure } = this;
    const isThere = unsure[this.step] === this.active; // no other key has led away since
    this.step = isThere ? (this.step + by + unsure.length) % unsure.length : 0;
    this.list.focus({ preventScroll: true });
    this.go(unsure[this.step]);
    setText(this.place, tr("{count} of {total}", { count: this.step + 1, total: unsure.length }));
  }

  // ---- its card

  showCard(place) {
    const token = this.tokens[place];
    const { card } = this;
    card.replaceChildren(...cardRows(token));
    card.hidden = false;
    card.style.setProperty("left", "0"); // or else it may be narrowed before it is measured
    const frame = this.element.getBoundingClientRect();
    const box = [...this.list.children[place].getClientRects()].at(-1) ?? frame;
    const end = document.querySelector(".composer").getBoundingClientRect().top;
    const isAbove = box.bottom + GAP_PX + card.offsetHeight > end && box.top - GAP_PX - card.offsetHeight > 0;
    const top = isAbove ? box.top - GAP_PX - card.offsetHeight : box.bottom + GAP_PX;
    card.style.setProperty("left", `${Math.max(0, Math.min(frame.width - card.offsetWidth, box.left - frame.left))}px`);
    card.style.setProperty("top", `${top - frame.top}px`);
  }

  hideCard() {
    this.card.hidden = true;
  }
}

function unsurePlaces(tokens) {
  const places = tokens.map((_, place) => place).sort((a, b) => tokens[a].chance - tokens[b].chance);
  return places.slice(0, NUM_UNSURE);
}

function lineOf(tokens, isPart) {
  const meanSurprise = tokens.reduce((sum, { chance }) => sum - Math.log(chance), 0) / tokens.length;
  const numbers = { count: formatNumber(tokens.length), perplexity: formatNumber(Math.exp(meanSurprise), 2) };
  const line = tr(tokens.length === 1 ? "{count} token, perplexity {perplexity}" : "{count} tokens, perplexity {perplexity}", numbers);
  return isPart ? `${line} · ${tr("Only the part that was written with this setting on.")}` : line;
}

function shadeOf(chance) {
  return LEAST.findIndex((least) => chance >= least);
}

function tokenElement(token) {
  const shown = document.createElement("span");
  shown.className = `sure-${shadeOf(token.chance)}`;
  if (!token.text) shown.classList.add("unwritten"); // a part of a character, or a sign that is no text
  if (token.text.includes("\n")) shown.classList.add("ends-line");
  shown.textContent = token.text;
  shown.setAttribute("role", "option");
  shown.setAttribute("aria-selected", "false");
  shown.setAttribute("aria-label", labelOf(token));
  return shown;
}

function labelOf({ piece, chance, others }) {
  return [[piece, chance], ...others.slice(0, 2).map((it) => [it.piece, it.chance])].map((pair) => `“${named(pair[0])}” ${percent(pair[1])}`).join(", ");
}

function named(piece) {
  return visible(shownPiece(piece));
}

/** 0.0004 -> "<0.1%" */
function percent(chance) {
  return chance < 0.0005 ? `<${formatPercent(0.001, 1)}` : formatPercent(chance, 1);
}

function cardRows({ piece, chance, others }) {
  const choices = [{ piece, chance, isWritten: true }, ...others].sort((a, b) => b.chance - a.chance);
  const rest = 1 - choices.reduce((sum, it) => sum + it.chance, 0);
  const rows = choices.map(({ piece: text, chance: share, isWritten }) => cardRow(named(text) || tr("(no text)"), share, isWritten));
  return rest >= 0.0005 ? [...rows, cardRow(tr("all others"), rest)] : rows;
}

function cardRow(name, share, isWritten = false) {
  const row = document.createElement("tr");
  const head = row.appendChild(document.createElement("th"));
  head.scope = "row";
  head.textContent = name;
  if (isWritten) {
    row.className = "written";
    const mark = head.appendChild(document.createElement("span"));
    mark.className = "muted";
    mark.textContent = ` ${tr("written")}`;
  }
  const number = row.appendChild(document.createElement("td"));
  number.textContent = percent(share);
  const bar = row.appendChild(document.createElement("td")).appendChild(document.createElement("span"));
  bar.style.setProperty("width", `${4 * share}rem`);
  return row;
}

function legendItem(least, i) {
  const item = document.createElement("li");
  const sample = item.appendChild(document.createElement("span"));
  sample.className = `sure-${i}`;
  const ends = { least: formatPercent(least), most: i ? formatPercent(LEAST[i - 1]) : "" };
  if (!i) sample.textContent = tr("over {least}", ends);
  else sample.textContent = least ? tr("{least} to {most}", ends) : tr("under {most}", ends);
  return item;
}
