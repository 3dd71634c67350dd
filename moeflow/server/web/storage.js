// JSON in the browser's storage. Where a browser stores nothing, or something damaged, the page works all the
// same and only forgets at a reload.

/** One value under one key, in `localStorage` (kept) or `sessionStorage` (until the tab closes). */
export class Stored {
  constructor(storageName, key) {
    this.storageName = storageName;
    this.key = `moeflow.${key}`;
    this.load();
  }

  load() {
    this.value = null;
    this.attempt((storage) => (this.value = JSON.parse(storage.getItem(this.key))));
  }

  /** Call `listener` when another tab has written or removed the value. */
  onChange(listener) {
    window.addEventListener("storage", ({ key }) => {
      if (key !== this.key && key !== null) return; // null: all is removed
      this.load();
      listener();
    });
  }

  read() {
    return this.value;
  }

  write(value) {
    this.value = value;
    this.attempt((storage) => storage.setItem(this.key, JSON.stringify(value)));
  }

  remove() {
    this.value = null;
    this.attempt((storage) => storage.removeItem(this.key));
  }

  attempt(action) {
    try {
      action(window[this.storageName]);
    } catch {
      // Forbidden, full or damaged: see above.
    }
  }
}

/** Remove everything that this page has kept so. */
export function forgetAll() {
  for (const name of ["localStorage", "sessionStorage"]) {
    try {
      const storage = window[name];
      for (const key of Object.keys(storage)) if (key.startsWith("moeflow.")) storage.removeItem(key);
    } catch {
      // Forbidden: see above.
    }
  }
}
