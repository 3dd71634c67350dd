// Asks for the settings of another attempt at an answer: a preset, a model, and any setting of them.

import { copyFields, SettingsFields } from "../presets/fields.js";
import { PresetChoice } from "../presets/preset_choice.js";
import { wholeValues } from "../presets/values.js";

export class TryAgain {
  /** `fields` are the fields of the settings. `onAsk(prompt, { model, preset, values })` gets the choice. */
  constructor(dialog, { settings, models, fields, onAsk }) {
    Object.assign(this, { dialog, settings, models, onAsk });
    const copy = copyFields(fields, "again");
    dialog.querySelector(".copied-fields").append(copy);
    this.fields = new SettingsFields(copy, (name, value) => (this.values[name] = value));
    this.model = dialog.querySelector("#try-again-model");
    this.choice = new PresetChoice(dialog.querySelector("#try-again-preset"), settings.presets, (id) => this.use(id));
    this.model.addEventListener("change", () => this.showDefaults());
    dialog.querySelector(".close").addEventListener("click", () => dialog.close());
    dialog.querySelector("form").addEventListener("submit", () => this.ask());
  }

  /** Begin with what the answer of a turn was asked with, or with what its conversation is held with. */
  open({ prompt, answer }, conversation) {
    this.prompt = prompt;
    this.preset = this.settings.presets.known(conversation.preset);
    this.values = wholeValues(this.settings.valuesFor(answer, conversation));
    this.model.replaceChildren(...this.models.names.map((name) => new Option(name)));
    this.model.closest(".field").hidden = this.models.names.length < 2;
    this.model.value = this.models.names.includes(answer.asked?.model) ? answer.asked.model : this.models.wanted;
    this.showDefaults();
    this.choice.show(this.preset);
    this.fields.show(this.values);
    this.dialog.showModal();
  }

  /** Begin anew with a preset. */
  use(id) {
    this.preset = id;
    this.values = this.settings.presets.values(id);
    this.fields.show(this.values);
  }

  showDefaults() {
    this.fields.showDefaults(this.models.defaultsOf(this.model.value));
  }

  ask() {
    const { prompt, preset, values } = this;
    this.onAsk(prompt, { model: this.model.value || undefined, preset, values });
  }
}
