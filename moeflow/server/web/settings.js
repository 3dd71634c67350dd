// The settings of the open conversation: the values of its preset, which the form shows and changes, and its own system
// prompt. Changes are a draft until the form is closed. It then shows the last good values again.

import { SettingsFields } from "./presets/fields.js";
import { Presets } from "./presets/presets.js";
import { DEFAULTS, wholeValues } from "./presets/values.js";

export class Settings {
  /** `form` has the fields; `current()` gives the open conversation. */
  constructor(form, current) {
    this.current = current;
    this.draft = null; // { preset, values } that the user has changed, and which no preset has yet
    this.fields = new SettingsFields(form.querySelector("#settings-fields"), (name, value) => this.take(name, value));
    this.presets = new Presets((values) => this.fields.checked(values));
    this.presets.addEventListener("change", () => this.show());
    form.closest("dialog").addEventListener("close", () => this.keep());
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
    this.draft = { preset: this.preset, values: { ...DEFAULTS } };
    this.show();
  }

  take(name, value) {
    this.draft = { preset: this.preset, values: { ...this.shown, [name]: value } };
  }

  /** The values in the form. */
  get shown() {
    return this.draft?.values ?? this.presets.values(this.preset);
  }

  /** Write the draft to its preset. */
  keep() {
    const { draft } = this;
    this.draft = null;
    if (draft) this.presets.write(draft.preset, draft.values);
    this.show();
  }

  /** Forget the draft; its preset stays as it was. Return the values that were shown. */
  takeDraft() {
    const { shown } = this;
    this.draft = null;
    return shown;
  }

  show() {
    this.fields.show(this.shown);
  }
}
