// Follows a growing page, unless the reader has scrolled away from its end.

const NEAR_PX = 60;

export function toBottom() {
  scrollTo(0, document.documentElement.scrollHeight);
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

function isNearBottom() {
  const page = document.documentElement;
  return page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_PX;
}
