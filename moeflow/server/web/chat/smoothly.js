// Limits drawing to one update per frame.

const REST = 2; // times as long as the last drawing took

/** Return a function that has `action` run at the next frame, however often it is called until then. An action that
 *  takes a large part of a frame then rests for a few, so that the page still scrolls and answers to keys. */
export function smoothly(action) {
  let isDue = false;
  let restsUntil = 0;
  const run = () => {
    const start = performance.now();
    if (start < restsUntil) {
      requestAnimationFrame(run);
      return;
    }
    isDue = false;
    action();
    const end = performance.now();
    restsUntil = end + REST * (end - start);
  };
  return () => {
    if (!isDue) requestAnimationFrame(run);
    isDue = true;
  };
}
