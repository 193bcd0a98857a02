// Search without a server: a browser starts no Worker from disk, so the theme's search script runs
// in a hidden frame. The theme asks for the name IFrameWorker, and the offline plugin, which would
// load its own from elsewhere, for the name of this file.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = [] // messages that came before the script was loaded
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = "<!doctype html><body></body>"
      this.frame.onload = () => this.run(url)
      document.body.append(this.frame)
    }

    run(url) {
      const inside = this.frame.contentWindow
      const load = (from) =>
        new Promise((done) => {
          const script = inside.document.createElement("script")
          script.onload = done
          script.src = from
          inside.document.body.append(script)
        })
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...urls) =>
        urls.reduce((before, from) => before.then(() => load(from)), Promise.resolve())
      load(url).then(() => {
        this.inside = inside
        this.waiting.forEach((data) => this.postMessage(data))
      })
    }

    postMessage(data) {
      if (this.inside) this.inside.dispatchEvent(new MessageEvent("message", { data }))
      else this.waiting.push(data)
    }

    terminate() {
      this.frame.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
