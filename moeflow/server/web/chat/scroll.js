// Follows a growing page, unless the reader has scrolled away from its end.

const NEAR_PX = 60;
const SETTLING_FRAMES = 5; // within which the browser has drawn what came into view
const SCROLLING_KEYS = new Set(["ArrowUp", "PageUp", "Home"]);

const page = document.documentElement;
let framesLeft = 0; // of settling
let frame = 0; // the next of them

// Do not use the scroll position: the browser itself changes it while it draws content above.
for (const move of ["wheel", "touchmove", "pointerdown"]) {
  addEventListener(move, () => (framesLeft = 0), { capture: true, passive: true });
}
addEventListener("keydown", ({ key }) => SCROLLING_KEYS.has(key) && (framesLeft = 0), { capture: true });

/** Scroll to the end. Content that comes into view only by that is drawn then, and may be longer than its placeholder.
*/
export function toBottom() {
  goToEnd();
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(settle);
  framesLeft = SETTLING_FRAMES;
}

/** Run `change`; if the end of the page was in view before, it is afterwards. */
export function keepingBottom(change) {
  const wasNear = isNearBottom();
  change();
  if (wasNear) toBottom();
}

/** Show `button` while the end of the page is out of view; a click leads there. */
export function offerBottom(button) {
  const update = () => (button.hidden = isNearBottom());
  button.addEventListener("click", toBottom);
  addEventListener("scroll", update, { passive: true });
  // The page grows without being scrolled, too.
  new ResizeObserver(update).observe(document.body);
}

function goToEnd() {
  scrollTo(0, page.scrollHeight);
}

function settle() {
  if (framesLeft === 0) return; // or the reader has scrolled
  framesLeft -= 1;
  goToEnd();
  frame = requestAnimationFrame(settle);
}

function isNearBottom() {
  return page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_PX;
}
