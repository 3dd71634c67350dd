// Things with names that the user keeps in this browser, such as presets and prompts. Tabs share the list.
// A file of them carries their ids, so that what refers to one finds it in another browser too.

import { newId } from "./conversations/conversation.js";
import { Stored } from "./storage.js";
import { tr } from "./translate.js";

const VERSION = 1;

/** Emits "change" when the list is another, here or in another tab. */
export class NamedList extends EventTarget {
  /** `kind` names the list in the storage and in files. `check(item)` returns the content of an item without its id and
   *  name, as far as it is known here, or throws an Error whose message is for the user. No item gets a name of `reserved`. */
  constructor(kind, check, reserved = []) {
    super();
    Object.assign(this, { kind, check, reserved });
    this.stored = new Stored("localStorage", kind);
    this.stored.onChange(() => this.tell());
  }

  get all() {
    return this.stored.read() ?? [];
  }

  find(id) {
    return this.all.find((item) => item.id === id) ?? null;
  }

  /** Add an item with a name, and return it. Its name gets a number if another item has it. */
  add(item) {
    const added = { ...item, id: item.id ?? newId(), name: this.freeName(item.name) };
    this.write([...this.all, added]);
    return added;
  }

  update(id, changes) {
    this.write(this.all.map((item) => (item.id === id ? { ...item, ...changes } : item)));
  }

  remove(id) {
    this.write(this.all.filter((item) => item.id !== id));
  }

  /** Forget all items. */
  reset() {
    this.stored.remove();
    this.tell();
  }

  /** The name, or with a number behind it, so that no item but that with the id `id` has it. */
  freeName(name, id = null) {
    const others = this.all.filter((item) => item.id !== id);
    const taken = new Set([...this.reserved, ...others.map((item) => item.name)]);
    let free = name;
    for (let number = 2; taken.has(free); number += 1) free = `${name} ${number}`;
    return free;
  }

  write(items) {
    this.stored.write(items);
    this.tell();
  }

  tell() {
    this.dispatchEvent(new Event("change"));
  }

  // ---- files

  /** The text of a file with all items. */
  fileText() {
    return `${JSON.stringify({ format: `moeflow-${this.kind}`, version: VERSION, items: this.all }, null, 1)}\n`;
  }

  /** Take in the items of a file; an item replaces one with the same id. Return their number. Throws an Error whose
   *  message is for the user; then nothing is taken in. */
  async import(file) {
    const items = this.read(await file.text(), file.name);
    for (const item of items) {
      if (this.find(item.id)) this.update(item.id, { ...item, name: this.freeName(item.name, item.id) });
      else this.add(item);
    }
    return items.length;
  }

  read(text, file) {
    try {
      const { format, version, items } = JSON.parse(text);
      if (format !== `moeflow-${this.kind}` || version !== VERSION) throw new Error(tr("it was not exported here"));
      return items.map((item) => ({ ...this.check(item), ...identity(item) }));
    } catch (error) {
      throw new Error(tr("{file} could not be imported: {reason}.", { file, reason: error.message }));
    }
  }
}

function identity({ id, name }) {
  const isNamed = typeof id === "string" && id && typeof name === "string" && name.trim();
  if (!isNamed) throw new Error(tr("something in it has no name"));
  return { id, name: name.trim() };
}
