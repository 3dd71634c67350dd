// Follows a growing page, unless the reader has scrolled away from its end.

const NEAR_PX = 60;
const SETTLING_FRAMES = 5; // within which the browser has drawn what came into view

const page = document.documentElement;
let framesLeft = 0; // of settling
let endTop = 0; // where the end was, when the page was last scrolled there

/** Scroll to the end. What comes into view only by that is drawn then, and may be longer than its place. */
export function toBottom() {
  goToEnd();
  if (framesLeft === 0) requestAnimationFrame(settle);
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
  endTop = page.scrollTop;
}

function settle() {
  const hasReaderLeft = page.scrollTop < endTop && !isNearBottom(); // the browser itself scrolls up only where the page ends
  framesLeft = hasReaderLeft ? 0 : framesLeft - 1;
  if (framesLeft === 0) return;
  goToEnd();
  requestAnimationFrame(settle);
}

function isNearBottom() {
  return page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_PX;
}
