// Follows a growing page, unless the reader has scrolled away from its end.

const NEAR_PX = 60;

export function toBottom() {
  scrollTo(0, document.documentElement.scrollHeight);
}

/** Run `change`; if the end of the page was in view before, it is afterwards. */
export function keepingBottom(change) {
  const page = document.documentElement;
  const wasNear = page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_PX;
  change();
  if (wasNear) toBottom();
}
