// The last requests in a table, which follows what comes. Rows stay where the focus is.

import { NONE } from "../../facts.js";
import { setText } from "../../set_text.js";
import { formatNumber, textKey, tr } from "../../translate.js";
import { make } from "../elements.js";
import { clock, kindOf, seconds, speed, stateName } from "./format.js";

const HEADS = [textKey("Request"), textKey("Kind"), textKey("State"), textKey("Came at"), textKey("Tokens"), textKey("First token"), textKey("Tokens/s"), textKey("Total")];
const STATES = ["running", "done", "stopped", "failed", "refused"];

export class RequestList {
  /** `onOpen(id)` is called for a chosen request. */
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.stories = [];
    this.rows = new Map(); // by id
    this.search = make("input", { type: "search", placeholder: tr("Search by id"), autocomplete: "off", spellcheck: false, "aria-label": tr("Search requests by id, kind, model or key") });
    this.state = make("select", { "aria-label": tr("State of the requests") }, make("option", { value: "", textContent: tr("All states") }), ...STATES.map((value) => make("option", { value, textContent: stateName(value) })));
    this.body = make("tbody");
    this.none = make("p", { className: "hint" });
    const head = make("thead", {}, make("tr", {}, ...HEADS.map((title) => make("th", { scope: "col", textContent: tr(title) }))));
    this.table = make("table", { className: "request-table" }, make("caption", { className: "unseen", textContent: tr("The last requests, newest first") }), head, this.body);
    this.element = make("div", {}, make("div", { className: "request-filter" }, this.search, this.state), this.none, this.table);
    this.search.addEventListener("input", () => this.draw());
    this.state.addEventListener("change", () => this.draw());
    this.body.addEventListener("click", ({ target }) => {
      const { id } = target.closest("tr").dataset;
      if (id) this.onOpen(id);
    });
    this.body.addEventListener("keydown", (event) => this.step(event));
  }

  show(stories) {
    this.stories = stories;
    this.draw();
  }

  /** Put the focus on a request's row, if it is there. */
  focus(id) {
    (this.rows.get(id)?.querySelector("button") ?? this.search).focus();
  }

  draw() {
    const found = this.stories.filter((story) => this.isWanted(story));
    const rows = new Map(found.map((story, i) => [story.id || `${i} ${story.started_at}`, story]));
    for (const [key, row] of this.rows) if (!rows.has(key)) row.remove();
    const drawn = [...rows].map(([key, story]) => [key, this.row(this.rows.get(key), story)]);
    drawn.forEach(([, row], i) => {
      if (this.body.children[i] !== row) this.body.insertBefore(row, this.body.children[i] ?? null);
    });
    this.rows = new Map(drawn);
    this.table.hidden = !found.length;
    setText(this.none, found.length ? "" : this.stories.length ? tr("No request fits.") : tr("No requests yet. Each request to this server, of this page or of any program, comes here."));
  }

  isWanted(story) {
    const wanted = this.search.value.trim().toLowerCase();
    const texts = [story.id, story.object_id, story.endpoint, kindOf(story), story.model, story.key ?? ""];
    const isOfState = !this.state.value || story.state === this.state.value;
    return isOfState && texts.some((text) => text.toLowerCase().includes(wanted));
  }

  row(old, story) {
    const row = old ?? this.newRow(story.id);
    const texts = [kindOf(story), stateText(story), clock(story.started_at), tokensText(story), orNone(story.first_token_s, seconds), orNone(story.tokens_per_s, speed), seconds(story.total_s)];
    texts.forEach((text, i) => setText(row.cells[i + 1], text));
    row.dataset.state = story.state;
    row.cells[2].title = story.error ?? "";
    return row;
  }

  newRow(id) {
    const name = make("th", { scope: "row" });
    if (id) {
      name.append(make("button", { type: "button", className: "link request-id", textContent: shortened(id), title: id, "aria-label": tr("Story of request {id}", { id }) }));
    } else {
      name.textContent = NONE;
      name.title = tr("Without API keys, only clients of this machine see ids.");
    }
    return make("tr", { "data-id": id }, name, ...HEADS.slice(1).map((title) => make("td", { "data-head": tr(title) })));
  }

  /** Arrow keys go from request to request. */
  step(event) {
    const buttons = [...this.body.querySelectorAll("button")];
    const place = buttons.indexOf(document.activeElement);
    const targets = { ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: buttons.length - 1 };
    const target = buttons[targets[event.key]];
    if (!target) return;
    event.preventDefault();
    target.focus();
  }
}

/** "refused (404)" */
const stateText = ({ state, status }) => (state === "refused" && status ? `${stateName(state)} (${status})` : stateName(state));

/** "34 in, 20 out" */
const tokensText = ({ state, prompt_tokens: prompt, completion_tokens: answer }) => (state === "refused" ? NONE : tr("{prompt} in, {answer} out", { prompt: formatNumber(prompt), answer: formatNumber(answer) }));

const orNone = (value, format) => (value === null ? NONE : format(value));

/** The ids of this server are long, and begin alike. */
const shortened = (id) => (id.length > 16 ? `${id.slice(0, 8)}…` : id);
