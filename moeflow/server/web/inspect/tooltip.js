// A few lines of text next to the pointer, or next to the element that the keyboard has reached.

import { setStyles } from "./canvas.js";

const GAP_PX = 12;

export class Tooltip {
  constructor() {
    this.element = document.createElement("div");
    this.element.className = "tooltip";
    this.element.setAttribute("aria-hidden", "true"); // screen readers get the text by `announce`
    this.element.hidden = true;
    this.isByKeys = false;
    for (const moving of ["wheel", "touchmove"]) addEventListener(moving, () => this.hide(), { passive: true });
  }

  /** Show lines of text at a point of the window, in CSS pixels, within the dialog of `near`. One that keys have brought
   *  stays where the page moves below a mouse at rest. */
  show(lines, { x, y }, near, { isByKeys = false } = {}) {
    this.isByKeys = isByKeys;
    const holder = near.closest("dialog") ?? document.body; // only there is it above all else
    if (this.element.parentElement !== holder) holder.append(this.element);
    this.element.replaceChildren(...lines.map(line));
    this.element.hidden = false;
    const { width, height } = this.element.getBoundingClientRect();
    const isLeft = x + GAP_PX + width > innerWidth;
    const isAbove = y + GAP_PX + height > innerHeight;
    setStyles(this.element, {
      left: `${Math.max(0, isLeft ? x - GAP_PX - width : x + GAP_PX)}px`,
      top: `${Math.max(0, isAbove ? y - GAP_PX - height : y + GAP_PX)}px`,
    });
  }

  hide() {
    this.element.hidden = true;
  }

  /** Hide it unless keys have brought it; return whether it is hidden. */
  leave() {
    if (!this.isByKeys) this.hide();
    return this.element.hidden;
  }
}

function line(text) {
  const element = document.createElement("div");
  element.textContent = text;
  return element;
}
