// Named sets of settings. A conversation is held with one of them. The default one is always there, has the id "", and is
// kept where the page has kept its only settings before.

import { NamedList } from "../named_list.js";
import { Stored } from "../storage.js";
import { tr } from "../translate.js";
import { wholeValues } from "./values.js";

/** Emits "change" when presets or their values are others, here or in another tab. */
export class Presets extends EventTarget {
  /** `check(values)` replaces values out of range by the defaults. */
  constructor(check) {
    super();
    this.list = new NamedList("presets", ({ values }) => ({ values: check(values) }), [tr("Default")]);
    this.defaults = new Stored("localStorage", "settings");
    this.chosen = new Stored("localStorage", "preset"); // the id of the one for new conversations
    this.list.addEventListener("change", () => this.tell());
    for (const stored of [this.defaults, this.chosen]) stored.onChange(() => this.tell());
  }

  /** Pairs of id and name, the default one first. */
  get names() {
    return [["", tr("Default")], ...this.list.all.map(({ id, name }) => [id, name])];
  }

  /** The id, if there is such a preset here, else that of the default one. */
  known(id) {
    return this.list.find(id) ? id : "";
  }

  name(id) {
    return this.list.find(id)?.name ?? tr("Default");
  }

  values(id) {
    return wholeValues(this.known(id) ? this.list.find(id).values : this.defaults.read());
  }

  /** Set all values of a preset. */
  write(id, values) {
    if (this.known(id)) this.list.update(id, { values });
    else {
      this.defaults.write(values);
      this.tell();
    }
  }

  /** The id of the preset that new conversations begin with. */
  get forNew() {
    return this.known(this.chosen.read() ?? "");
  }

  set forNew(id) {
    if (id) this.chosen.write(id);
    else this.chosen.remove();
    this.tell();
  }

  /** Forget all presets, and the settings of the default one. */
  reset() {
    this.defaults.remove();
    this.chosen.remove();
    this.list.reset();
  }

  tell() {
    this.dispatchEvent(new Event("change"));
  }
}
