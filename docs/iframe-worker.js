/* Let the search run in pages opened from disk. Browsers start no worker there, so its script runs in a hidden frame. */
"use strict";
(() => {
  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => {
        const message = new MessageEvent("message", {data});
        this.dispatchEvent(message);
        this.onmessage?.(message);
      };
      inside.importScripts = async (...urls) => {
        for (const each of urls) await load(inside.document, each);
      };
      this.started = load(inside.document, url);
    }

    async postMessage(data) {
      await this.started;
      const message = new MessageEvent("message", {data: structuredClone(data)});
      this.frame.contentWindow.dispatchEvent(message);
    }

    terminate() {
      this.frame.remove();
    }
  }

  function load(page, url) {
    return new Promise((resolve, reject) => {
      const script = page.createElement("script");
      script.onload = resolve;
      script.onerror = () => reject(new Error(`expected a script at ${url}, got none`));
      script.src = url;
      page.body.appendChild(script);
    });
  }

  window.IFrameWorker = FrameWorker; // the search asks its page for this name to find its own scripts
  if (location.protocol === "file:") window.Worker = FrameWorker;
})();
