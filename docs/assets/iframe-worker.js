// Search in pages that are opened from a disk (file://), where browsers start no Worker: a hidden frame runs its script.
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #loaded;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      window.addEventListener("message", (event) => {
        if (event.source === this.#frame.contentWindow) {
          this.dispatchEvent(new MessageEvent("message", { data: event.data }));
        }
      });
      const inner = this.#frame.contentDocument;
      inner.open();
      inner.write("<!doctype html><body></body>");
      inner.close();
      this.#frame.contentWindow.postMessage = (data) => {
        // The worker answers its page; the page's messages come by `postMessage` below.
        window.dispatchEvent(new MessageEvent("message", { data, source: this.#frame.contentWindow }));
      };
      this.#loaded = new Promise((resolve) => {
        const script = inner.createElement("script");
        script.src = url;
        script.onload = resolve;
        inner.body.append(script);
      });
    }

    postMessage(data) {
      const inner = this.#frame.contentWindow;
      this.#loaded.then(() => inner.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
