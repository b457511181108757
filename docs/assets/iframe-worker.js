// Browsers start no Worker from a page that was opened from a disk. This makes one of an iframe, for the search of such pages.
"use strict"
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = this.onerror = null
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.document.write("<!doctype html><meta charset=utf-8><body></body>")
      this.inside.document.close()
      this.inside.postMessage = data => setTimeout(() => {
        const told = new MessageEvent("message", {data})
        this.dispatchEvent(told)
        if (this.onmessage) this.onmessage(told)
      })
      const load = address => new Promise((done, failed) => {
        const script = this.inside.document.createElement("script")
        Object.assign(script, {src: address, async: false, onload: done, onerror: failed})
        this.inside.document.body.append(script)
      })
      this.inside.importScripts = (...addresses) => Promise.all(addresses.map(load))
      load(url).then(() => {
        this.waiting.forEach(data => this.deliver(data))
        this.waiting = null
      })
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.deliver(data)
    }
    deliver(data) {
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", {data}))
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
