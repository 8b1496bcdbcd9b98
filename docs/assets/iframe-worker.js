// A page that was opened from a file may not start a worker, so there the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = message => this.reply(message);
      inside.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => this.load(inside, next)), Promise.resolve());
      this.waiting = this.load(inside, url).then(() => inside);
    }
    load(inside, url) {
      return new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        Object.assign(script, {src: url, onload: done, onerror: failed});
        inside.document.body.append(script);
      });
    }
    reply(data) {
      this.dispatchEvent(new MessageEvent("message", {data}));
    }
    postMessage(data) {
      this.waiting.then(inside => inside.dispatchEvent(new MessageEvent("message", {data})));
    }
    terminate() {}
  };
}
