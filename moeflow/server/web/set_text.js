// Writes a text only where it is another: writing the same again costs a layout, and a screen reader would say it again.

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
