// The library of prompts: named texts with placeholders, which "/" inserts into the message.

import { addStyles } from "../add_styles.js";
import { lazily } from "../lazily.js";
import { NamedList } from "../named_list.js";
import { tr } from "../translate.js";
import { placeholders } from "./placeholders.js";

export class Prompts {
  /** `at(id)` gives an element of the page. */
  constructor(at, composer, announce) {
    this.composer = composer;
    this.list = new NamedList("prompts", checked);
    const styles = () => addStyles("./prompts.css", import.meta.url);
    this.menu = lazily(async () => {
      await styles();
      const { PromptMenu } = await import("./prompt_menu.js");
      const onInsert = (prompt, start, end) => this.insert(prompt, start, end);
      return new PromptMenu(composer.box, at("prompt-menu"), this.list, { onInsert, onManage: () => this.manage(), announce });
    });
    this.fill = lazily(async () => {
      await styles();
      const { FillDialog } = await import("./fill_dialog.js");
      return new FillDialog(at("fill-prompt"));
    });
    this.manager = lazily(async () => {
      await styles();
      const { PromptManager } = await import("./prompt_manager.js");
      return new PromptManager(at("prompts"), this.list, announce);
    });
    this.hasMenu = false; // until the first "/"
    composer.box.addEventListener("input", () => this.offer());
  }

  /** Open or close the list at the message. */
  async offer() {
    this.hasMenu ||= this.composer.box.value.includes("/");
    if (this.hasMenu) (await this.menu()).update();
  }

  /** Put a prompt in the place of a part of the message. */
  async insert(prompt, start, end) {
    const insert = (text) => this.composer.insert(text, start, end);
    if (!placeholders(prompt.text).length) {
      insert(prompt.text);
      return;
    }
    const dialog = await this.fill();
    dialog.open(prompt, insert, () => this.composer.focus());
  }

  async manage() {
    (await this.manager()).open();
  }
}

function checked({ text }) {
  if (typeof text !== "string" || !text.trim()) throw new Error(tr("a prompt in it has no text"));
  return { text };
}
