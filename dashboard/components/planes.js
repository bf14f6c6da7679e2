// All pages of one worker as typed arrays, kept current by decoded frames. Pure: no DOM, no sockets.

import { DELTA, LISTS, SNAPSHOT } from "./decode.js";

export const FREE = 1, ACTIVE = 2, CACHED = 3, PINNED = 4, RESERVED = 5;
export const STATE_NAMES = ["unknown", "free", "active", "cached", "pinned", "reserved"];
const STATE_BITS = 7, USED_BIT = 32;
const USED_SPAN = 2 ** 32; // ms, 49.7 days: what `used` counts modulo
export const SEALED_BIT = 8, PINNED_BIT = 16;

export class Planes {
  // `hello` is the text frame that begins an epoch.
  constructor(hello) {
    const count = hello.page_count;
    this.count = count;
    this.pageSize = hello.page_size;
    this.startMs = hello.start_ms;
    this.revision = 0;
    this.clock = 0;
    this.isPast = false;
    this.isWhole = false;
    this.state = new Uint8Array(count);
    this.bits = new Uint8Array(count);
    this.refs = new Uint8Array(count);
    this.fill = hello.page_size > 255 ? new Uint16Array(count) : new Uint8Array(count);
    this.owner = new Uint16Array(count);
    this.used = new Uint32Array(count); // ms since the worker's start, modulo 2^32
    this.counts = new Uint32Array(8); // pages by state
    this.lists = new Map(); // by owner: pages in token order
    this.parts = [];
  }

  // Takes one decoded frame. Returns "all", "some" with `changed` set, "lists", or null: nothing to paint.
  apply(frame) {
    this.changed = null;
    if (frame.header.kind === SNAPSHOT) return this.takePart(frame);
    if (frame.header.kind === LISTS) return this.takeLists(frame);
    if (frame.header.kind !== DELTA || !this.isWhole || this.isPast) return null;
    this.takeDelta(frame);
    return frame.pages.length ? "some" : null;
  }

  takePart(frame) {
    if (frame.firstPage === 0) this.parts = [];
    this.parts.push(frame);
    if (frame.partsLeft) return null;
    const parts = this.parts.splice(0);
    if (parts.reduce((sum, part) => sum + part.header.count, 0) !== this.count) return null;
    this.clock = frame.header.clock;
    this.revision = frame.header.revision;
    this.isPast = frame.header.isPast;
    const now = this.clock - this.startMs;
    for (const part of parts) {
      const at = part.firstPage;
      this.owner.set(part.owners, at);
      this.refs.set(part.refs, at);
      this.fill.set(part.fill, at);
      for (let i = 0; i < part.states.length; i++) {
        this.state[at + i] = part.states[i] & STATE_BITS;
        this.bits[at + i] = part.states[i];
        this.used[at + i] = now - part.idle[i];
      }
    }
    this.counts.fill(0);
    for (let page = 0; page < this.count; page++) this.counts[this.state[page]]++;
    this.isWhole = true;
    return "all";
  }

  takeDelta(frame) {
    this.revision = frame.header.revision;
    this.clock = frame.header.clock;
    const now = this.clock - this.startMs;
    const { pages, states, refs, fill, owners } = frame;
    for (let i = 0; i < pages.length; i++) {
      const page = pages[i], state = states[i] & STATE_BITS;
      this.counts[this.state[page]]--;
      this.counts[state]++;
      this.state[page] = state;
      this.bits[page] = states[i];
      this.refs[page] = refs[i];
      this.fill[page] = fill[i];
      this.owner[page] = owners[i];
      if (states[i] & USED_BIT) this.used[page] = now;
    }
    this.changed = pages;
  }

  takeLists(frame) {
    if (frame.header.isAll) this.lists.clear();
    for (let i = 0; i < frame.owners.length; i++) {
      const pages = frame.pages.slice(frame.starts[i], frame.starts[i + 1]);
      if (pages.length) this.lists.set(frame.owners[i], pages);
      else this.lists.delete(frame.owners[i]);
    }
    return "lists";
  }

  idleMs(page) {
    return Math.max(0, this.clock - this.startMs - this.used[page]) % USED_SPAN;
  }

  // A page in a few words.
  describe(page) {
    const state = STATE_NAMES[this.state[page]] || "unknown";
    const lines = [`page ${page} · ${state}`];
    if (this.state[page] === FREE || this.state[page] === RESERVED) return lines;
    lines.push(`fill ${this.fill[page]}/${this.pageSize} · refs ${this.refs[page]}`);
    const marks = [];
    if (this.owner[page]) marks.push(`sequence #${this.owner[page]}`);
    if (this.bits[page] & SEALED_BIT) marks.push("sealed");
    if (this.bits[page] & PINNED_BIT) marks.push("pinned");
    marks.push(`idle ${seconds(this.idleMs(page))}`);
    lines.push(marks.join(" · "));
    return lines;
  }
}

export function seconds(ms) {
  if (ms < 10_000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms < 120_000) return `${Math.round(ms / 1000)} s`;
  if (ms < 7_200_000) return `${Math.round(ms / 60_000)} min`;
  return `${Math.round(ms / 3_600_000)} h`;
}
