// JSON in the browser's storage. A browser that stores nothing, or something damaged, costs the memory only.

/** One value under one key, in `localStorage` (kept) or `sessionStorage` (until the tab closes). */
export class Stored {
  constructor(storageName, key) {
    this.storageName = storageName;
    this.key = `moeflow.${key}`;
  }

  read() {
    try {
      return JSON.parse(window[this.storageName].getItem(this.key));
    } catch {
      return null;
    }
  }

  write(value) {
    try {
      window[this.storageName].setItem(this.key, JSON.stringify(value));
    } catch {
      // Storage is full or forbidden: the page works on, it just forgets.
    }
  }

  remove() {
    try {
      window[this.storageName].removeItem(this.key);
    } catch {
      // As above.
    }
  }
}
