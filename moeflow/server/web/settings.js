// The settings of the open conversation: the values of its preset, which the form shows and changes, and its own system
// prompt. Closing the form shows the last good values again.

import { SettingsFields } from "./presets/fields.js";
import { Presets } from "./presets/presets.js";
import { DEFAULTS, wholeValues } from "./presets/values.js";

export class Settings {
  /** `form` has the fields; `current()` gives the open conversation. */
  constructor(form, current) {
    this.current = current;
    this.fields = new SettingsFields(form.querySelector("#settings-fields"), (name, value) => this.take(name, value));
    this.presets = new Presets((values) => this.fields.checked(values));
    this.presets.addEventListener("change", () => this.show());
    form.closest("dialog").addEventListener("close", () => this.show());
  }

  /** The id of the preset that the open conversation is held with. */
  get preset() {
    return this.presets.known(this.current().preset);
  }

  /** What the next answer of a conversation is asked with. */
  valuesOf({ preset, system }) {
    const values = this.presets.values(preset);
    return { ...values, system: (system ?? values.system).trim() };
  }

  /** What an answer is asked with: its own values, if it was begun with such, or else those of its conversation. */
  valuesFor(answer, conversation) {
    const { asked } = answer;
    return asked?.isOwn ? wholeValues(asked.values) : this.valuesOf(conversation);
  }

  showDefaults(defaults) {
    this.fields.showDefaults(defaults);
  }

  reset() {
    this.presets.write(this.preset, { ...DEFAULTS });
  }

  take(name, value) {
    this.isTaking = true; // what the user writes must stay as it is written
    this.presets.write(this.preset, { ...this.presets.values(this.preset), [name]: value });
    this.isTaking = false;
  }

  show() {
    if (!this.isTaking) this.fields.show(this.presets.values(this.preset));
  }
}
