// The pool over ten minutes: a column a second, bands of pages from top to bottom. Polls its own route.

import { choice, clock, element, fitCanvas, isDark, loadStyles, located, number, ratioOf, setText } from "./dom.js";
import { mix, ramp, rgbOf } from "./colours.js";
import { continues, placed, readSpectrogram } from "./strip.js";

const SPAN = 600, POLL_MS = 1000;
const MODES = ["occupancy", "churn", "age"];
const ACTIVE = 0, CACHED = 1, CHURN = 2, AGE = 3;

export function mount(component) {
  const root = component.parentElement;
  root.kvatlas ??= new Spectrogram(root, located(component.data));
  root.kvatlas.update(component);
  return () => {
    root.kvatlas?.close();
    root.kvatlas = null;
  };
}

class Spectrogram {
  constructor(root, data) {
    loadStyles(root, data.modules);
    this.root = root;
    this.data = data;
    this.mode = MODES[0];
    this.columns = [];
    this.next = 0;
    this.modes = choice("Colour", MODES, this.mode, (name) => { this.mode = name; this.modes.press(name); this.paint(); });
    this.words = element("span", { class: "muted" });
    this.canvas = element("canvas", { class: "wide", role: "img", style: "height: 46vh", "aria-label": "pages over the last ten minutes" });
    this.tip = element("div", { class: "tip", hidden: true });
    this.axis = element("div", { class: "axis muted" }, "10 min ago", element("span", {}, "now"));
    this.legend = element("div", { class: "legend" });
    this.node = element("div", { class: "kvatlas", style: "position: relative" },
      element("div", { class: "controls" }, this.modes.group, this.words), this.legend, this.canvas, this.axis, this.tip);
    root.append(this.node);
    this.image = document.createElement("canvas");
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("click", (event) => {
      const found = this.at(event);
      if (found) this.pick({ t: Math.round(found.column.time), page: found.first, last: found.last });
    });
    this.timer = setInterval(() => this.poll(), POLL_MS);
    this.resizes = new ResizeObserver(() => this.paint());
    this.resizes.observe(this.node);
    this.poll();
  }

  close() {
    clearInterval(this.timer);
    this.resizes.disconnect();
    this.node.remove();
  }

  update({ data, setTriggerValue }) {
    this.pick = (value) => setTriggerValue("picked", value);
    if (data.worker !== this.data.worker) {
      this.columns = [];
      this.next = 0;
    }
    this.data = located(data);
  }

  async poll() {
    if (document.hidden || this.isBusy) return;
    this.isBusy = true;
    try {
      const { spectrogram } = this.data, answer = await readSpectrogram(spectrogram, this.next);
      if (spectrogram !== this.data.spectrogram) return; // another worker's
      if (!continues(answer, this)) this.columns = [];
      this.pageCount = answer.pageCount;
      this.bands = answer.bands;
      const size = 4 * answer.bands;
      answer.times.forEach((time, at) => {
        this.columns.push({ time, cut: answer.cuts[at], values: answer.columns.subarray(at * size, (at + 1) * size) });
      });
      this.columns.splice(0, this.columns.length - SPAN);
      this.next = answer.first + answer.times.length;
      this.paint();
    } catch (error) {
      setText(this.words, `no columns: ${error.message}`);
    } finally {
      this.isBusy = false;
    }
  }

  paint() {
    if (!this.columns.length) return;
    const dark = isDark(this.root), kind = dark ? "dark" : "light", { palette } = this.data;
    const free = rgbOf(palette.states.free[kind]), active = rgbOf(palette.states.active[kind]), cached = rgbOf(palette.states.cached[kind]);
    this.paintLegend(kind);
    const { bands } = this, image = new ImageData(SPAN, bands), places = placed(this.columns);
    const put = (x, y, [r, g, b]) => image.data.set([r, g, b, 255], (y * SPAN + x) * 4);
    const surface = rgbOf(palette.ground.surface[kind]); // nobody looked yet, or nothing was heard
    for (let x = 0; x < SPAN; x++) for (let y = 0; y < bands; y++) put(x, y, surface);
    places.forEach(({ x, seconds, column: { values, cut } }) => {
      for (let band = 0; band < bands; band++) {
        const value = (plane) => values[plane * bands + band] / 255;
        let rgb;
        if (cut) rgb = rgbOf(palette.ground.text[kind]);
        else if (this.mode === "occupancy") rgb = mix(mix(free, cached, value(CACHED)), active, value(ACTIVE));
        else if (this.mode === "churn") rgb = value(CHURN) ? ramp(Math.sqrt(value(CHURN))) : free;
        else rgb = value(AGE) ? ramp(value(AGE)) : free;
        for (let at = 0; at < seconds; at++) put(x + at, band, rgb);
      }
    });
    this.image.width = SPAN;
    this.image.height = bands;
    this.image.getContext("2d").putImageData(image, 0, 0);
    fitCanvas(this.canvas);
    const context = this.canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(this.image, 0, 0, this.canvas.width, this.canvas.height);
    this.paintBeginning(context, places[0], palette.ground.muted[kind]);
    setText(this.words, `page 0 above, page ${number(this.pageCount - 1)} below · ${SPAN - places[0].x} s`);
    this.node.dataset.columns = this.columns.length;
  }

  // Why there is nothing on the left: nobody looked.
  paintBeginning(context, { x, column }, colour) {
    const ratio = ratioOf(), edge = (x / SPAN) * this.canvas.width;
    context.font = `${12 * ratio}px ${getComputedStyle(this.node).fontFamily}`;
    const text = `this dashboard looks since ${clock(column.time)}`;
    if (context.measureText(text).width > edge - 16 * ratio) return;
    context.fillStyle = colour;
    context.textAlign = "right";
    context.fillText(text, edge - 8 * ratio, 20 * ratio);
    context.textAlign = "left";
  }

  paintLegend(kind) {
    const key = `${this.mode} ${kind}`;
    if (this.legendKey === key) return;
    this.legendKey = key;
    const { states } = this.data.palette;
    const swatch = (name, text = name) => element("span", {}, element("i", { class: `swatch ${name}`, style: `background-color: ${states[name][kind]}` }), text);
    const scale = (from, to) => {
      const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => `rgb(${ramp(share)})`);
      return element("span", {}, from, element("i", { class: "ramp", style: `background: linear-gradient(90deg, ${stops})` }), to);
    };
    this.legend.replaceChildren(...{
      occupancy: [swatch("active"), swatch("cached"), swatch("free")],
      churn: [swatch("free", "nothing changed in that second"), scale("few pages", "all")],
      age: [swatch("free", "nothing active"), scale("oldest active page: new", "9 min")],
    }[this.mode]);
  }

  at(event) {
    const x = Math.floor((event.offsetX / this.canvas.clientWidth) * SPAN);
    const band = Math.floor((event.offsetY / this.canvas.clientHeight) * this.bands);
    const column = placed(this.columns).find((place) => x >= place.x && x < place.x + place.seconds)?.column;
    if (!column || band < 0 || band >= this.bands) return null;
    const edge = (number) => Math.floor((number * this.pageCount) / this.bands);
    return { column, band, first: edge(band), last: edge(band + 1) - 1 };
  }

  hover(event) {
    const found = this.at(event);
    this.tip.hidden = !found;
    if (!found) return;
    const { column, band, first, last } = found, of = (plane) => column.values[plane * this.bands + band];
    const percent = (plane) => `${Math.round((of(plane) * 100) / 255)}%`;
    const age = 2 ** (of(AGE) / 28) - 1;
    setText(this.tip, [
      `${clock(column.time)} · pages ${number(first)} … ${number(last)}`,
      `active ${percent(ACTIVE)} · cached ${percent(CACHED)} · changed ${percent(CHURN)}`,
      `oldest active page ${age >= 540 ? "over 9 min" : `${age.toFixed(0)} s`}`,
    ].join("\n"));
    const box = this.node.getBoundingClientRect(), ratio = 1 / ratioOf();
    this.tip.style.left = `${Math.min(event.clientX - box.left + 12 * ratio, box.width - 260)}px`;
    this.tip.style.top = `${event.clientY - box.top + 12}px`;
  }
}
