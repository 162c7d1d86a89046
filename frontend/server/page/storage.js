// What the browser keeps of settings: texts by name, for good or until the tab is closed. A browser may refuse to.

/** The text of a name; null: there is none. */
export const kept = (name) => guarded(() => localStorage.getItem(name));
export const keptInTab = (name) => guarded(() => sessionStorage.getItem(name));

/** Keep a text; null: forget it. False: the browser does not. */
export const keep = (name, text) => put(() => localStorage, name, text);
export const keepInTab = (name, text) => put(() => sessionStorage, name, text);

function guarded(read) {
  try {
    return read();
  } catch {
    return null;
  }
}

function put(storage, name, text) {
  try {
    if (text === null) storage().removeItem(name);
    else storage().setItem(name, text);
    return true;
  } catch {
    return false;
  }
}
