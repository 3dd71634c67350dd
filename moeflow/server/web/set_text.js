// Writes a text only where it is another: writing the same again costs a layout, and a screen reader would say it again.

export function setText(element, text) {
  if (element.textContent === text) return;
  const { firstChild } = element;
  const isTextAlone = firstChild?.nodeType === Node.TEXT_NODE && firstChild === element.lastChild;
  if (isTextAlone) firstChild.data = text; // a new node at every frame would have to be collected
  else element.textContent = text;
}
