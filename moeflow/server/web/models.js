// Which model to ask, where the server has several: a choice in the place of the name, remembered in this browser.

import { askJson } from "./api.js";
import { Stored } from "./storage.js";

/** Emits "change" when another model may be the one to ask. */
export class ModelChoice extends EventTarget {
  /** `select` stands in the place of `heading`; `apiKey()` gives the key to send. */
  constructor(select, heading, apiKey) {
    super();
    Object.assign(this, { select, heading, apiKey });
    this.stored = new Stored("localStorage", "model");
    select.addEventListener("change", () => {
      this.stored.write(select.value);
      this.dispatchEvent(new Event("change"));
    });
  }

  /** The name to ask for; undefined where there is nothing to choose. */
  get name() {
    return this.select.hidden ? undefined : this.select.value;
  }

  async update() {
    const { data } = await askJson("v1/models", { apiKey: this.apiKey() });
    const names = data.map((model) => model.id);
    this.select.replaceChildren(...names.map((name) => new Option(name)));
    if (names.includes(this.stored.read())) this.select.value = this.stored.read();
    this.select.hidden = names.length < 2;
    this.heading.classList.toggle("unseen", names.length > 1);
    if (this.name) this.dispatchEvent(new Event("change"));
  }
}
