// A part of an answer that few answers have. The module of its view is loaded with the first value.

import { lazily } from "../lazily.js";
import { keepingBottom } from "./scroll.js";

export class RarePart {
  /** `make()` promises the view, which has `update(value)`. */
  constructor(make) {
    this.make = lazily(make);
    this.view = null;
  }

  /** Show a value. `isThere`: there is something to show, so the view is needed. */
  update(value, isThere) {
    this.value = value;
    if (this.view) this.view.update(value);
    else if (isThere) this.load();
  }

  async load() {
    this.view = await this.make();
    keepingBottom(() => this.view.update(this.value)); // it may be a later one
  }
}
