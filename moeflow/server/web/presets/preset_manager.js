// Keeps, renames, deletes, exports and imports presets; part of the settings.

import { saveText } from "../save_file.js";
import { tr } from "../translate.js";

export class PresetManager {
  /** `part` has the controls. `actions`: current() gives the id of the chosen preset, choose(id) chooses one,
   *  takeDraft() gives the values shown and leaves the chosen preset as it was, announce(text). */
  constructor(part, presets, actions) {
    Object.assign(this, { part, presets, actions });
    const at = (selector) => part.querySelector(selector);
    this.name = at("#preset-name");
    this.problem = at(".wrong");
    this.forNew = at("#preset-for-new");
    this.picker = at("input[type=file]");
    this.buttons = { rename: at(".rename"), delete: at(".delete"), export: at(".export") };
    at(".save").addEventListener("click", () => this.save());
    this.buttons.rename.addEventListener("click", () => this.rename());
    this.buttons.delete.addEventListener("click", () => this.delete());
    this.buttons.export.addEventListener("click", () => this.export());
    at(".import").addEventListener("click", () => this.picker.click());
    this.picker.addEventListener("change", () => this.import([...this.picker.files]));
    this.forNew.addEventListener("change", () => (presets.forNew = this.forNew.checked ? this.id : ""));
    this.name.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault(); // it would close the settings
      this.save();
    });
  }

  get id() {
    return this.actions.current();
  }

  show() {
    const { id } = this;
    this.buttons.rename.disabled = this.buttons.delete.disabled = !id;
    this.buttons.export.disabled = this.presets.list.all.length === 0;
    this.forNew.checked = this.presets.forNew === id;
    this.forNew.disabled = this.forNew.checked && !id; // one of them it must be
    if (id !== this.shownId) this.name.value = id ? this.presets.name(id) : "";
    this.shownId = id;
  }

  /** Keep the values that are shown as another preset. */
  save() {
    const name = this.enteredName();
    if (!name) return;
    const { id } = this.presets.list.add({ name, values: this.actions.takeDraft() });
    this.actions.choose(id);
    this.actions.announce(tr("The preset {name} is kept.", { name: this.presets.name(id) }));
  }

  rename() {
    const name = this.enteredName();
    if (!name) return;
    this.presets.list.update(this.id, { name: this.presets.list.freeName(name, this.id) });
    this.name.value = this.presets.name(this.id);
    this.actions.announce(tr("The preset is now {name}.", { name: this.name.value }));
  }

  delete() {
    const { id } = this;
    const name = this.presets.name(id);
    if (!confirm(tr("Delete the preset {name}? Conversations with it then use the default one.", { name }))) return;
    this.actions.takeDraft();
    this.presets.list.remove(id);
    this.actions.choose("");
    this.actions.announce(tr("The preset {name} is deleted.", { name }));
    this.name.focus();
  }

  export() {
    saveText("presets.json", "application/json", this.presets.list.fileText());
  }

  async import(files) {
    this.picker.value = "";
    this.complain("");
    try {
      for (const file of files) await this.presets.list.import(file);
      this.actions.announce(tr("The presets are imported."));
    } catch (error) {
      this.complain(error.message);
    }
  }

  enteredName() {
    const name = this.name.value.trim();
    this.complain(name ? "" : tr("Give the preset a name."));
    if (!name) this.name.focus();
    return name;
  }

  complain(text) {
    this.problem.textContent = text;
  }
}
