// Conversations in this browser's IndexedDB, a record each. Other tabs hear of every change.

const [NAME, RECORDS] = ["pagewire", "conversations"];
const channel = new BroadcastChannel("pagewire.conversations");
let database = null;

function opened() {
  database ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(RECORDS, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return database;
}

async function run(mode, work) {
  const transaction = (await opened()).transaction(RECORDS, mode);
  const request = work(transaction.objectStore(RECORDS));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error); // for example, no room is left
  });
}

/** All records. Throws DOMException where the browser stores nothing, as all of these do. */
export const all = () => run("readonly", (records) => records.getAll());

export const get = (id) => run("readonly", (records) => records.get(id));

export async function put(record) {
  await run("readwrite", (records) => records.put(record));
  channel.postMessage(record.id);
}

export async function remove(id) {
  await run("readwrite", (records) => records.delete(id));
  channel.postMessage(id);
}

/** Call `changed(id, record)` for each change in another tab; record: undefined if it was deleted. */
export function listen(changed) {
  channel.onmessage = async ({ data: id }) => changed(id, await get(id));
}
