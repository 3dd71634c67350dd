// What holds for a whole conversation, at its top: its system prompt, and its preset where there are several.

import { PresetChoice } from "../presets/preset_choice.js";
import { setText } from "../set_text.js";
import { tr } from "../translate.js";

const MAX_SHOWN = 200; // characters of a system prompt that is folded

export class HeadView {
  /** `current()` gives the open conversation. `actions`: onPreset(id), onSystem(text) with null for the preset's, and
   *  onKeep() once the user has finished. */
  constructor(element, presets, current, actions) {
    Object.assign(this, { element, presets, current, actions });
    this.details = element.querySelector("details");
    this.line = this.details.querySelector("summary span");
    this.box = this.details.querySelector("textarea");
    this.back = this.details.querySelector("button");
    this.select = element.querySelector("select");
    this.choice = new PresetChoice(this.select, presets, actions.onPreset);
    this.box.addEventListener("input", () => {
      actions.onSystem(this.box.value);
      this.showLine();
    });
    this.box.addEventListener("change", () => actions.onKeep());
    this.back.addEventListener("click", () => {
      actions.onSystem(null);
      actions.onKeep();
      this.box.focus();
      this.show();
    });
    this.details.addEventListener("toggle", () => {
      this.showLine();
      if (this.details.open) this.details.scrollIntoView({ block: "nearest" });
    });
  }

  show() {
    this.choice.show(this.current().preset);
    this.select.hidden = this.presets.names.length < 2;
    if (document.activeElement !== this.box || this.id !== this.current().id || !this.hasOwn) this.box.value = this.text;
    this.id = this.current().id;
    this.showLine();
  }

  /** Unfold the system prompt and go to it. */
  edit() {
    this.details.open = true;
    this.box.focus();
  }

  get hasOwn() {
    return this.current().system !== null;
  }

  get text() {
    const { system, preset } = this.current();
    return system ?? this.presets.values(preset).system;
  }

  showLine() {
    const { preset } = this.current();
    const text = this.text.trim();
    const source = this.hasOwn ? tr("of this conversation") : tr("of the preset {name}", { name: this.presets.name(preset) });
    const isFolded = !this.details.open && text;
    setText(this.line, text || this.hasOwn ? `${source}${isFolded ? ` · ${shortened(text)}` : ""}` : tr("the model’s own"));
    this.back.hidden = !this.hasOwn;
  }
}

function shortened(text) {
  return text.length > MAX_SHOWN ? `${text.slice(0, MAX_SHOWN)}…` : text;
}
