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

  /** Put what `change` makes of the values under one key in all tables, given and returned by table, in their place;
   *  undefined deletes. Changes are atomic, also between tabs. */
  async update(key, change) {
    const transaction = this.database.transaction(this.database.objectStoreNames, "readwrite");
    const stores = [...transaction.objectStoreNames].map((name) => transaction.objectStore(name));
    const work = async () => {
      const values = await Promise.all(stores.map((store) => outcome(store.get(key))));
      try {
        const changed = change(Object.fromEntries(stores.map((store, i) => [store.name, values[i]])));
        for (const store of stores) {
          if (changed[store.name] === undefined) store.delete(key);
          else store.put(changed[store.name], key);
        }
      } catch (error) {
        transaction.abort();
        throw error;
      }
    };
    await Promise.all([work(), completed(transaction)]);
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

  async update(key, change) {
    const tables = Object.entries(this.tables);
    const changed = structuredClone(change(Object.fromEntries(tables.map(([name, table]) => [name, table.get(key)]))));
    for (const [name, table] of tables) {
      if (changed[name] === undefined) table.delete(key);
      else table.set(key, changed[name]);
    }
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
