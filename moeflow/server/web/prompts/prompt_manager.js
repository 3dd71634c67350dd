// The library of prompts as a dialog: write one, edit and delete, export and import.

import { saveText } from "../save_file.js";
import { tr } from "../translate.js";

export class PromptManager {
  /** `announce(text)` is for screen readers. */
  constructor(dialog, prompts, announce) {
    Object.assign(this, { dialog, prompts, announce });
    const at = (selector) => dialog.querySelector(selector);
    this.form = at("form.edit-prompt");
    [this.name, this.text] = [at("#prompt-name"), at("#prompt-text")];
    [this.heading, this.cancel, this.problem] = [at("h3"), at(".cancel"), at(".wrong")];
    [this.list, this.none, this.exportButton] = [at(".prompts"), at(".none"), at(".export")];
    this.picker = at("input[type=file]");
    this.editedId = null; // of the prompt in the form; null: a new one
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.save();
    });
    this.cancel.addEventListener("click", () => this.write(null));
    at(".close").addEventListener("click", () => dialog.close());
    at(".import").addEventListener("click", () => this.picker.click());
    this.exportButton.addEventListener("click", () => saveText("prompts.json", "application/json", prompts.fileText()));
    this.picker.addEventListener("change", () => this.import([...this.picker.files]));
    prompts.addEventListener("change", () => this.show());
  }

  open() {
    this.show();
    this.write(null);
    this.dialog.showModal();
    this.name.focus();
  }

  show() {
    const { all } = this.prompts;
    this.list.replaceChildren(...all.map((prompt) => this.item(prompt)));
    this.none.hidden = all.length > 0;
    this.exportButton.disabled = all.length === 0;
  }

  item(prompt) {
    const item = document.getElementById("prompt-item-template").content.firstElementChild.cloneNode(true);
    const [name, text, edit, remove] = ["h4", "p", ".edit", ".delete"].map((selector) => item.querySelector(selector));
    name.textContent = prompt.name;
    text.textContent = prompt.text;
    edit.setAttribute("aria-label", tr("Edit {name}", { name: prompt.name }));
    remove.setAttribute("aria-label", tr("Delete {name}", { name: prompt.name }));
    edit.addEventListener("click", () => {
      this.write(prompt);
      this.name.focus();
    });
    remove.addEventListener("click", () => this.delete(prompt));
    return item;
  }

  /** Put a prompt into the form; null: a new one. */
  write(prompt) {
    this.editedId = prompt?.id ?? null;
    this.heading.textContent = prompt ? tr("Edit the prompt") : tr("New prompt");
    this.name.value = prompt?.name ?? "";
    this.text.value = prompt?.text ?? "";
    this.cancel.hidden = !prompt;
    this.problem.textContent = "";
  }

  save() {
    const { prompts, editedId } = this;
    const item = { name: this.name.value.trim(), text: this.text.value.trim() };
    if (!item.name || !item.text) {
      this.problem.textContent = tr("A prompt has a name and a text.");
      (item.name ? this.text : this.name).focus();
      return;
    }
    if (prompts.find(editedId)) prompts.update(editedId, { ...item, name: prompts.freeName(item.name, editedId) });
    else prompts.add(item);
    this.announce(tr("The prompt {name} is kept.", { name: item.name }));
    this.write(null);
    this.name.focus();
  }

  delete({ id, name }) {
    if (!confirm(tr("Delete the prompt {name}?", { name }))) return;
    this.prompts.remove(id);
    if (this.editedId === id) this.write(null);
    this.announce(tr("The prompt {name} is deleted.", { name }));
    this.name.focus();
  }

  async import(files) {
    this.picker.value = "";
    this.problem.textContent = "";
    try {
      for (const file of files) await this.prompts.import(file);
      this.announce(tr("The prompts are imported."));
    } catch (error) {
      this.problem.textContent = error.message;
    }
  }
}
