// Parts of the page that most visits do without: their modules are loaded when they are first used.

/** Return a function that gives what `make` promises. It is made once; after a failure, such as a lost connection, the
 *  next call tries again. */
export function lazily(make) {
  let made = null;
  return () => (made ??= make().catch((error) => {
    made = null;
    throw error;
  }));
}
