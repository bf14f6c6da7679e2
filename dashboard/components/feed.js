// The WebSocket of the page feed: opens, opens again with a growing pause, reads frames in order.

import { VERSION, decode } from "./decode.js";

const FIRST_PAUSE_MS = 250, LAST_PAUSE_MS = 3000;
const HIDDEN_HZ = 2;
const SILENCE_MS = 2250; // a tick comes each second
const WATCH_MS = 250;

export class Feed {
  // `on`: hello(text), status(text), tick(text), frame(decoded).
  constructor(url, hz, on) {
    this.url = url;
    this.hz = hz;
    this.on = on;
    this.pause = FIRST_PAUSE_MS;
    this.bytes = 0;
    this.wishes = {};
    this.isClosed = false;
    this.watch = setInterval(() => this.listen(), WATCH_MS);
    this.onVisible = () => this.send({ hz: document.hidden ? HIDDEN_HZ : this.hz });
    document.addEventListener("visibilitychange", this.onVisible);
    this.open();
  }

  open() {
    const socket = new WebSocket(this.url + (this.url.includes("?") ? "&" : "?") + `hz=${this.hz}`);
    socket.binaryType = "arraybuffer";
    this.socket = socket;
    this.queue = Promise.resolve();
    this.status = this.heardAt = null;
    socket.onopen = () => {
      if (Object.keys(this.wishes).length) socket.send(JSON.stringify(this.wishes));
      if (document.hidden) this.onVisible();
    };
    socket.onmessage = (event) => {
      this.pause = FIRST_PAUSE_MS; // not when it opens: a socket too many opens, and is closed with the reason
      this.hear();
      this.bytes += event.data.byteLength ?? event.data.length;
      // Inflating takes its time; what follows must wait, or deltas would overtake their snapshot.
      this.queue = this.queue.then(() => this.take(event.data, socket)).catch((error) => this.fail(error));
    };
    socket.onclose = (event) => {
      if (this.isClosed || this.socket !== socket) return;
      const reason = event.code === 1013 ? "too many viewers of this dashboard" : "the dashboard does not answer";
      this.on.status({ status: "disconnected", reason, age_ms: 0 });
      this.timer = setTimeout(() => this.open(), this.pause);
      this.pause = Math.min(this.pause * 2, LAST_PAUSE_MS);
    };
  }

  // Silence of the dashboard itself: its process hangs, or the way to it is cut without a word.
  listen() {
    const now = performance.now(), wasLate = now - this.listenedAt > 4 * WATCH_MS;
    this.listenedAt = now;
    // After a pause of this tab the messages of that time are still to be read. A hidden tab has slow timers.
    if (wasLate || document.hidden || !this.heardAt || this.socket.readyState !== WebSocket.OPEN) return;
    const silence = now - this.heardAt;
    if (silence < SILENCE_MS) return;
    this.isSilent = true;
    this.on.status({ status: "stale", reason: "nothing is heard of the dashboard", age_ms: silence });
  }

  hear() {
    if (this.heardAt !== null) this.heardAt = performance.now();
    if (!this.isSilent) return;
    this.isSilent = false;
    if (this.status) this.on.status(this.status);
  }

  async take(data, socket) {
    if (socket !== this.socket) return;
    if (typeof data !== "string") {
      this.on.frame(await decode(data));
      return;
    }
    const text = JSON.parse(data);
    if (text.type === "hello" && text.version !== VERSION) throw new Error(`version ${text.version}`);
    if (text.type === "status") this.status = text;
    if (text.status === "connecting") this.heardAt = null; // no map, no ticks
    if (text.type === "tick") this.heardAt = performance.now(); // from now on one comes each second
    this.on[text.type]?.(text);
  }

  fail(error) {
    this.close();
    this.on.status({ status: "other_version", reason: `reload the page: ${error.message}`, age_ms: 0 });
  }

  // `lists`, `at`, `live`; kept for the next connection.
  send(wish) {
    const { lists, at, live } = wish;
    if (lists !== undefined) this.wishes.lists = lists;
    if (at !== undefined) this.wishes.at = at;
    if (live) delete this.wishes.at;
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(wish));
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    clearInterval(this.watch);
    document.removeEventListener("visibilitychange", this.onVisible);
    this.socket.close();
  }
}
