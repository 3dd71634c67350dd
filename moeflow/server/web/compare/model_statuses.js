// Whether each model of the server is loaded, while answers wait for their first token.

import { askJson } from "../api.js";

const PERIOD_MS = 1000;

export class ModelStatuses {
  /** `apiKey()` gives the key to send. `isWaiting()`: whether an answer has no token yet; `onChange()` is called when a
   *  status may be another. */
  constructor({ apiKey, isWaiting, onChange }) {
    Object.assign(this, { apiKey, isWaiting, onChange });
    this.statuses = new Map(); // by name
    this.timer = null;
  }

  /** "ready", "loading", "unloaded" or another of the server's words; undefined where it is not known. */
  of(name) {
    return this.statuses.get(name);
  }

  /** Look now and then, until no answer waits. */
  async watch() {
    clearTimeout(this.timer);
    if (!this.isWaiting()) return;
    try {
      const { data } = await askJson("v1/models", { apiKey: this.apiKey() });
      this.statuses = new Map(data.map(({ id, status }) => [id, status]));
    } catch {
      this.statuses.clear(); // the answers themselves tell of problems
    }
    this.onChange();
    this.timer = setTimeout(() => this.watch(), PERIOD_MS);
  }
}
