// A parser of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html). No IO.

/** Parses text in pieces of any size; `feed` returns the events that a piece completes. */
export class EventParser {
  #rest = "";
  #data = [];
  #event = "";

  /** @param {string} text  @returns {{event: string, data: string}[]} */
  feed(text) {
    this.#rest += text;
    const events = [];
    // A carriage return at the very end may be the first half of a line break: it is held until the next piece.
    for (let end; (end = /\r\n|\n|\r(?!$)/.exec(this.#rest)) !== null; ) {
      const line = this.#rest.slice(0, end.index);
      this.#rest = this.#rest.slice(end.index + end[0].length);
      const event = this.#line(line);
      if (event) events.push(event);
    }
    return events;
  }

  #line(line) {
    if (line === "") {
      const event = { event: this.#event || "message", data: this.#data.join("\n") };
      const empty = this.#data.length === 0;
      [this.#event, this.#data] = ["", []];
      return empty ? null : event;
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "data") this.#data.push(value);
    else if (field === "event") this.#event = value;
    return null; // comments, ids and retry times are ignored
  }
}
