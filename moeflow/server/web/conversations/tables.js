// Tables of values by key, in IndexedDB. Where a browser keeps nothing, they live as long as the page does.

/** Open the tables of these names. */
export async function openTables(database, names) {
  try {
    return new KeptTables(await open(database, names));
  } catch {
    return new PassingTables(names);
  }
}

function open(database, names) {
  const request = indexedDB.open(database, 1);
  request.onupgradeneeded = () => names.forEach((name) => request.result.createObjectStore(name));
  return outcome(request);
}

class KeptTables {
  constructor(database) {
    this.database = database;
    database.onversionchange = () => database.close(); // another tab deletes it or brings a newer page
  }

  get(table, key) {
    return outcome(this.database.transaction(table).objectStore(table).get(key));
  }

  all(table) {
    return outcome(this.database.transaction(table).objectStore(table).getAll());
  }

  /** Set a value in each of several tables under one key, all or none; undefined deletes. */
  set(key, values) {
    const transaction = this.database.transaction(Object.keys(values), "readwrite");
    for (const [table, value] of Object.entries(values)) {
      if (value === undefined) transaction.objectStore(table).delete(key);
      else transaction.objectStore(table).put(value, key);
    }
    return completed(transaction);
  }

  clear() {
    const names = [...this.database.objectStoreNames];
    const transaction = this.database.transaction(names, "readwrite");
    for (const name of names) transaction.objectStore(name).clear();
    return completed(transaction);
  }
}

class PassingTables {
  constructor(names) {
    this.tables = Object.fromEntries(names.map((name) => [name, new Map()]));
  }

  async get(table, key) {
    return structuredClone(this.tables[table].get(key));
  }

  async all(table) {
    return structuredClone([...this.tables[table].values()]);
  }

  async set(key, values) {
    for (const [table, value] of Object.entries(values)) {
      if (value === undefined) this.tables[table].delete(key);
      else this.tables[table].set(key, structuredClone(value));
    }
  }

  async clear() {
    for (const table of Object.values(this.tables)) table.clear();
  }
}

function outcome(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("another tab holds an older database"));
  });
}

function completed(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
  });
}
