// The library of prompts: named texts with placeholders, which "/" inserts into the message.

import { NamedList } from "../named_list.js";
import { tr } from "../translate.js";
import { placeholders } from "./placeholders.js";
import { PromptMenu } from "./prompt_menu.js";

export class Prompts {
  /** `at(id)` gives an element of the page; the dialogs are loaded when they are first needed. */
  constructor(at, composer, announce) {
    Object.assign(this, { at, composer, announce });
    this.list = new NamedList("prompts", checked);
    const onInsert = (prompt, start, end) => this.insert(prompt, start, end);
    new PromptMenu(composer.box, at("prompt-menu"), this.list, { onInsert, onManage: () => this.manage(), announce });
  }

  /** Put a prompt in the place of a part of the message. */
  async insert(prompt, start, end) {
    const insert = (text) => this.composer.insert(text, start, end);
    if (!placeholders(prompt.text).length) {
      insert(prompt.text);
      return;
    }
    if (!this.fill) {
      const { FillDialog } = await import("./fill_dialog.js");
      this.fill ??= new FillDialog(this.at("fill-prompt"));
    }
    this.fill.open(prompt, insert, () => this.composer.focus());
  }

  async manage() {
    if (!this.manager) {
      const { PromptManager } = await import("./prompt_manager.js");
      this.manager ??= new PromptManager(this.at("prompts"), this.list, this.announce);
    }
    this.manager.open();
  }
}

function checked({ text }) {
  if (typeof text !== "string" || !text.trim()) throw new Error(tr("a prompt in it has no text"));
  return { text };
}
