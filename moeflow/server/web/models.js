// Which model to ask, where the server has several: a choice in the place of the name. A conversation keeps its model.
// New ones use the last chosen model, which this browser remembers.

import { askJson } from "./api.js";
import { Stored } from "./storage.js";

/** Emits "choose" when the user has chosen, and "change" when another model may be the one to ask. */
export class ModelChoice extends EventTarget {
  /** `select` stands in the place of `heading`; `apiKey()` gives the key to send, `held()` the name of the model that
   *  the open conversation was held with, or "". */
  constructor(select, heading, { apiKey, held }) {
    super();
    Object.assign(this, { select, heading, apiKey, held });
    this.stored = new Stored("localStorage", "model");
    this.names = []; // of the models served; empty until the server has told them
    this.cards = new Map(); // what the server tells of each, by name
    select.addEventListener("change", () => this.choose());
  }

  /** The name to ask for; undefined where there is nothing to choose. */
  get name() {
    return this.select.hidden ? undefined : this.select.value;
  }

  /** The model that the open conversation was held with, if it is not served here; else "". */
  get missing() {
    const held = this.held();
    return this.names.length && !this.names.includes(held) ? held : "";
  }

  async update() {
    const { data } = await askJson("v1/models", { apiKey: this.apiKey() });
    this.names = data.map((model) => model.id);
    this.cards = new Map(data.map((model) => [model.id, model]));
    this.select.replaceChildren(...this.names.map((name) => new Option(name)));
    this.select.hidden = this.names.length < 2;
    this.heading.classList.toggle("unseen", this.names.length > 1);
    this.select.value = this.wanted;
    this.dispatchEvent(new Event("change"));
  }

  /** Show the choice for the conversation that is open now. */
  show() {
    const { wanted } = this;
    if (this.select.value === wanted) return;
    this.select.value = wanted;
    this.dispatchEvent(new Event("change"));
  }

  /** The name of a model that is served; "" before they are known. */
  get wanted() {
    return [this.held(), this.stored.read()].find((name) => this.names.includes(name)) ?? this.names[0] ?? "";
  }

  /** What the server takes for sampling fields that a request leaves open, as far as it tells. */
  get samplingDefaults() {
    return this.defaultsOf(this.wanted);
  }

  defaultsOf(name) {
    return this.cards.get(name)?.default_sampling_params ?? {};
  }

  choose() {
    this.stored.write(this.select.value);
    this.dispatchEvent(new Event("choose"));
    this.dispatchEvent(new Event("change"));
  }
}
