// The last ten minutes as stacked states, with marks where pages were evicted or sequences preempted.
// A press or a drag goes back in time.

import { element, fitCanvas, ratioOf } from "./dom.js";
import { rgbOf } from "./colours.js";

const SPAN = 600; // columns, and seconds
const MAX_STRETCH = 3; // seconds that a late column may stand for; longer is a hole
const FIGURES = 14; // of one second, as dashboard/spectrogram.py
const POLL_MS = 1000;

export class Strip {
  constructor(url, palette, onPick) {
    this.url = url;
    this.palette = palette;
    this.onPick = onPick;
    this.columns = [];
    this.next = 0;
    this.canvas = element("canvas", { class: "strip", "aria-label": "pages by state, last ten minutes; drag to go back" });
    this.canvas.addEventListener("pointerdown", (event) => this.press(event));
    this.canvas.addEventListener("pointermove", (event) => event.buttons && this.press(event));
    this.timer = setInterval(() => this.poll(), POLL_MS);
    this.pastMs = null;
    this.poll();
  }

  close() {
    clearInterval(this.timer);
  }

  // Another worker's pages.
  follow(url) {
    this.url = url;
    this.columns = [];
    this.next = 0;
    this.setPast(null);
  }

  async poll() {
    if (document.hidden || this.isBusy) return;
    this.isBusy = true;
    try {
      const { url } = this, answer = await readSpectrogram(url, this.next);
      if (url !== this.url) return;
      if (!continues(answer, this)) this.columns = [];
      this.pageCount = answer.pageCount;
      answer.times.forEach((time, at) => {
        this.columns.push({ time, cut: answer.cuts[at], figures: answer.figures.subarray(at * FIGURES, (at + 1) * FIGURES) });
      });
      this.columns.splice(0, this.columns.length - SPAN);
      this.next = answer.first + answer.times.length;
      this.draw();
    } catch {
      // The map tells what is wrong; the strip waits.
    } finally {
      this.isBusy = false;
    }
  }

  press(event) {
    if (!this.columns.length) return;
    const x = Math.round((event.offsetX / this.canvas.clientWidth) * SPAN);
    if (x >= SPAN - 1) this.onPick(null);
    else this.onPick((placed(this.columns).findLast((place) => place.x <= x)?.column ?? this.columns[0]).time);
  }

  setPast(ms) {
    this.pastMs = ms;
    this.draw();
  }

  setTheme(isDark) {
    this.kind = isDark ? "dark" : "light";
    this.draw();
  }

  draw() {
    if (!this.canvas.isConnected) return;
    fitCanvas(this.canvas);
    const context = this.canvas.getContext("2d"), { width, height } = this.canvas;
    const look = (group, name) => this.palette[group][name][this.kind || "dark"];
    const step = width / SPAN, marks = 5 * ratioOf();
    context.fillStyle = look("ground", "surface"); // nobody looked yet, or nothing was heard
    context.fillRect(0, 0, width, height);
    let last = null;
    placed(this.columns).forEach(({ x: place, seconds, column: { figures, cut } }) => {
      const x = Math.floor(place * step), wide = Math.ceil(seconds * step);
      context.fillStyle = look("states", "free");
      context.fillRect(x, marks, wide, height - marks);
      const total = figures[0] + figures[1] + figures[2] + figures[3] + figures[4] || 1;
      let y = height;
      for (const [index, name] of [[4, "reserved"], [3, "pinned"], [1, "active"], [2, "cached"]]) {
        const tall = (figures[index] / total) * (height - marks);
        context.fillStyle = look("states", name);
        context.fillRect(x, y - tall, wide, tall);
        y -= tall;
      }
      context.fillStyle = look("ground", "background");
      context.fillRect(x, 0, wide, marks);
      if (last && figures[6] > last[6]) {
        context.fillStyle = look("results", "miss_evicted");
        context.fillRect(x, 0, wide, marks / 2);
      }
      if (last && figures[7] > last[7]) {
        context.fillStyle = look("bands", "exhausted");
        context.fillRect(x, 0, Math.max(wide, 2), marks);
      }
      if (cut) {
        context.fillStyle = look("ground", "text");
        context.fillRect(x - 1, 0, 2, height);
      }
      last = cut ? null : figures;
    });
    this.drawPast(context, step, look("ground", "text"));
  }

  drawPast(context, step, colour) {
    if (this.pastMs === null) return;
    const found = placed(this.columns).find(({ column }) => column.time >= this.pastMs);
    if (!found) return;
    context.fillStyle = colour;
    context.fillRect(found.x * step - 1, 0, 3, this.canvas.height);
  }
}

// Whether columns follow those that a reader has: not those of another process or of a pool of another size.
export function continues({ first, pageCount }, reader) {
  return first >= reader.next && pageCount === reader.pageCount;
}

// Where columns stand, by their seconds: the newest at the right end, none upon another, no column where nothing
// was heard for a while. [{column, x, seconds}], x and seconds in columns of the whole; what is older is left out.
export function placed(columns) {
  const newest = columns.at(-1)?.time, found = [];
  let next = SPAN;
  for (let at = columns.length - 1; at >= 0; at--) {
    const column = columns[at], x = Math.min(next - 1, SPAN - 1 - Math.round((newest - column.time) / 1000));
    if (x < 0) break;
    found.push({ column, x, seconds: next - x > MAX_STRETCH ? 1 : next - x });
    next = x;
  }
  return found.reverse();
}

// Columns from number `since` on: {first, bands, pageCount, times, cuts, figures, columns}.
export async function readSpectrogram(url, since) {
  const response = await fetch(`${url}${url.includes("?") ? "&" : "?"}since=${since}`);
  if (!response.ok) throw new Error(`status ${response.status}`);
  const stream = response.body.pipeThrough(new DecompressionStream("deflate"));
  return parseSpectrogram(await new Response(stream).arrayBuffer());
}

export function parseSpectrogram(buffer) {
  const [first, count, bands, pageCount] = new Uint32Array(buffer, 0, 4);
  let place = 16;
  const take = (Kind, length) => {
    const array = new Kind(buffer, place, length);
    place += array.byteLength;
    return array;
  };
  const times = take(Float64Array, count), figures = take(Uint32Array, count * FIGURES);
  const cuts = take(Uint8Array, count), columns = take(Uint8Array, count * 4 * bands);
  return { first, bands, pageCount, times, cuts, figures, columns };
}

export function colourOf(palette, group, name, isDark) {
  return rgbOf(palette[group][name][isDark ? "dark" : "light"]);
}
