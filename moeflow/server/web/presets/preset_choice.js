// A choice among the presets, for the open conversation.

export class PresetChoice {
  /** `onChoose(id)` gets the choice. */
  constructor(select, presets, onChoose) {
    Object.assign(this, { select, presets });
    select.addEventListener("change", () => onChoose(select.value));
  }

  /** Offer the presets, with the one of the id `id` chosen. */
  show(id) {
    const { names } = this.presets;
    const shown = JSON.stringify(names);
    if (shown !== this.shown) this.select.replaceChildren(...names.map(([value, name]) => new Option(name, value)));
    this.shown = shown; // drawn anew, an open list would close
    this.select.value = this.presets.known(id);
  }
}
