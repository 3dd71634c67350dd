// Moves the time line by pointers and wheel: drag to pan, pinch or wheel to zoom.
//
// The wheel alone scrolls the page, unless the time line has the focus; with Control it always zooms.

const WHEEL_ZOOM = 0.002;

/** `view` has timeAt(x), zoom(factor, around), pan(us), hover(event or null), press(event). */
export function listen(canvas, view) {
  const held = new Map(); // pointers that are down: id -> x
  let moved = 0;
  let gap = 0; // between two fingers

  canvas.addEventListener("wheel", (event) => {
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      view.pan(view.timeAt(event.deltaX) - view.timeAt(0));
    } else if (event.ctrlKey || event.metaKey || document.activeElement === canvas) {
      event.preventDefault();
      view.zoom(Math.exp(event.deltaY * WHEEL_ZOOM), view.timeAt(event.offsetX));
    }
  }, { passive: false });

  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    held.set(event.pointerId, event.offsetX);
    moved = 0;
    gap = gapOf(held);
  });

  canvas.addEventListener("pointermove", (event) => {
    if (!held.has(event.pointerId)) {
      view.hover(event);
      return;
    }
    const before = held.get(event.pointerId);
    held.set(event.pointerId, event.offsetX);
    moved += Math.abs(event.offsetX - before);
    if (held.size === 1) {
      if (moved > 3) view.pan(view.timeAt(before) - view.timeAt(event.offsetX));
      return;
    }
    const now = gapOf(held);
    const [one, other] = held.values();
    if (gap && now) view.zoom(gap / now, view.timeAt((one + other) / 2));
    gap = now;
  });

  canvas.addEventListener("pointerup", (event) => {
    if (held.delete(event.pointerId) && moved <= 3) view.press(event);
  });
  canvas.addEventListener("pointercancel", (event) => held.delete(event.pointerId));
  canvas.addEventListener("pointerleave", () => view.hover(null));
}

function gapOf(held) {
  const [one, other] = held.values();
  return held.size === 2 ? Math.abs(one - other) : 0;
}
