// The live map: controls, canvas, legend, strip. Owns one socket per DOM node, closed when the view is left.

import { Colours, MODES, ramp } from "./colours.js";
import { choice, clock, element, fitCanvas, followed, isDark, loadStyles, located, number, ratioOf, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { Grid, LAYOUTS, MAX_SORTED_PAGES, orderOf } from "./layout.js";
import { Painter } from "./paint.js";
import { Planes, STATE_NAMES, seconds } from "./planes.js";
import { Strip } from "./strip.js";
import { Keys } from "./keys.js";
import { Pointer } from "./pointer.js";

const FADE_MS = 66; // between two pictures of what fades: sixty a second cost a third of a core
const LEGEND_MS = 500, SORT_MS = 1000, SPOKEN_MS = 5000;
const LABELLED = ["free", "active", "cached", "pinned", "reserved"];

export function mount(component) {
  const root = component.parentElement, data = located(component.data);
  if (!root.kvatlasMap) root.kvatlasMap = new PageMap(root, data);
  root.kvatlasMap.update(data, component.setTriggerValue);
  return () => {
    root.kvatlasMap?.close();
    root.kvatlasMap = null;
  };
}

export class PageMap {
  constructor(root, data) {
    this.root = root;
    this.data = data;
    this.view = { mode: "state", layout: "physical", flash: true, grid: true, rings: [], selected: -1, cursor: -1 };
    this.view.flash = !matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.grid = new Grid();
    this.planes = null;
    this.status = { status: "connecting", reason: "", age_ms: 0 };
    this.pastMs = null;
    this.drawMs = 0;
    loadStyles(root, data.modules);
    this.build();
    this.painter = new Painter(this.canvas);
    this.setTheme();
    this.open();
    this.resizes = new ResizeObserver(() => this.resize());
    this.resizes.observe(this.stage);
    this.keys = new Keys(this);
    this.pointer = new Pointer(this);
    this.timer = setInterval(() => this.everySoOften(), LEGEND_MS);
    this.draw = this.draw.bind(this);
  }

  build() {
    this.looks = {
      colour: followed(this, "colour", MODES, (name) => this.setMode(name)),
      layout: followed(this, "layout", LAYOUTS, (name) => this.setLayout(name)),
    };
    this.colour = choice("Colour", MODES, "state", (name) => this.looks.colour.pick(name));
    this.layout = choice("Layout", LAYOUTS, "physical", (name) => this.looks.layout.pick(name));
    this.flashBox = this.toggle("flash", this.view.flash);
    this.gridBox = this.toggle("grid", true);
    this.goTo = element("input", { type: "number", min: 0, placeholder: "page", "aria-label": "go to page", class: "goto" });
    this.goTo.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter" && this.goTo.value !== "") this.showPage(Number(this.goTo.value));
      if (event.key === "Escape") this.canvas.focus();
    });
    this.pauseButton = element("button", { type: "button", title: "pause (space)", onclick: () => this.togglePause() }, "pause");
    this.dot = element("span", { class: "dot" });
    this.statusText = element("span", { class: "status" });
    const controls = element("div", { class: "controls" },
      element("div", { class: "state" }, this.dot, this.statusText, this.pauseButton),
      this.colour.group, this.layout.group,
      element("div", { class: "choice" }, this.flashBox, this.gridBox, this.goTo));
    this.canvas = element("canvas", { class: "map", tabindex: 0, role: "application" });
    this.tip = element("div", { class: "tip", hidden: true });
    this.mini = element("canvas", { class: "mini", hidden: true, "aria-hidden": "true" });
    this.banner = element("div", { class: "banner", hidden: true });
    this.bar = element("div", { class: "bar", hidden: true });
    this.stage = element("div", { class: "stage" }, this.canvas, this.mini, this.tip, this.banner, this.bar);
    this.legend = element("div", { class: "legend" });
    this.spoken = element("div", { class: "spoken", "aria-live": "polite" });
    this.strip = new Strip(this.data.spectrogram, this.data.palette, (ms) => this.goTime(ms));
    this.node = element("div", { class: "kvatlas", "data-state": "connecting" }, controls, this.stage, this.legend, this.strip.canvas, this.spoken);
    this.root.append(this.node);
  }

  toggle(name, isOn) {
    const box = element("input", { type: "checkbox", onchange: () => { this.view[name] = box.checked; this.repaint(); } });
    box.checked = isOn;
    return element("label", {}, box, name);
  }

  open() {
    this.feed = new Feed(this.data.socket, this.data.hz, {
      hello: (text) => this.takeHello(text),
      status: (text) => this.takeStatus(text),
      tick: (text) => this.takeTick(text),
      frame: (frame) => this.takeFrame(frame),
    });
  }

  // Python's wishes: the worker, and what is selected from outside.
  update(data, setTriggerValue) {
    this.setTriggerValue = setTriggerValue;
    if (data.socket !== this.data.socket) {
      this.data = data;
      this.follow();
    }
    this.data = data;
    for (const [name, look] of Object.entries(this.looks)) look.take(data[name]);
    if (data.selected !== this.givenSelected) {
      this.givenSelected = data.selected;
      this.wanted = data.selected;
    }
    if (data.owner !== this.givenOwner) {
      this.givenOwner = data.owner;
      this.ringOwner = data.owner;
      if (data.owner) this.feed.send({ lists: 1 });
    }
    if (data.at !== this.givenAt) {
      this.givenAt = data.at;
      if (data.at) this.goTime(data.at);
    }
    this.select();
  }

  // Another worker: what was shown, wished for and ringed is not of it.
  follow() {
    this.feed.close();
    this.planes = this.tick = this.pastMs = null;
    this.givenOwner = undefined;
    this.strip.follow(this.data.spectrogram);
    this.open();
    if (this.view.layout === "request") this.feed.send({ lists: 1 });
  }

  close() {
    this.feed.close();
    this.strip.close();
    this.resizes.disconnect();
    clearInterval(this.timer);
    cancelAnimationFrame(this.frameRequest);
    clearTimeout(this.fadeTimer);
    this.node.remove();
  }

  // messages

  takeHello(text) {
    this.hello = text;
    this.planes = new Planes(text);
    this.view.cursor = -1;
    this.orderAt = 0;
    this.ringOwner = this.givenOwner; // a new life numbers its sequences anew
    if (this.wanted === undefined && this.view.selected >= 0) this.wanted = this.view.selected;
    const isSortable = text.page_count <= MAX_SORTED_PAGES;
    for (const [name, button] of this.layout.buttons) button.disabled = name !== "physical" && !isSortable;
    if (!isSortable) this.setLayout("physical");
    this.resize();
  }

  takeStatus(text) {
    this.status = text;
    this.showStatus();
  }

  takeTick(text) {
    this.tick = text;
  }

  takeFrame(frame) {
    if (!this.planes) return;
    const news = this.planes.apply(frame);
    this.revision = frame.header.revision;
    if (news === "all") {
      this.reorder();
      this.rebuild();
      this.select();
      this.showStatus();
    } else if (news === "some") {
      const flashAt = this.view.flash ? performance.now() : 0;
      this.painter.update(this.planes.changed, this.grid, this.colourOf, flashAt);
      this.repaint();
    } else if (news === "lists") {
      this.findRings();
      this.repaint();
    }
    if (this.planes.isWhole) this.tellAttributes();
  }

  // For tests and for whoever looks with the browser's tools: cheap and exact.
  tellAttributes() {
    const { dataset } = this.node, { planes } = this;
    dataset.revision = planes.revision;
    dataset.counts = LABELLED.map((name) => planes.counts[STATE_NAMES.indexOf(name)]).join(",");
    dataset.bytes = this.feed.bytes;
    dataset.drawMs = this.drawMs.toFixed(2);
    dataset.past = planes.isPast ? planes.clock : "";
  }

  // painting

  setTheme() {
    this.isDark = isDark(this.root);
    this.colours = new Colours(this.data.palette, this.isDark);
    this.strip.setTheme(this.isDark);
    this.node.classList.toggle("dark", this.isDark);
  }

  resize() {
    fitCanvas(this.canvas, this.stage);
    if (!this.planes) return;
    this.grid.resize(this.planes.count, this.canvas.width, this.canvas.height, ratioOf());
    if (this.planes.isWhole) this.rebuild();
  }

  reorder() {
    this.grid.setOrder(orderOf(this.view.layout, this.planes));
    this.orderAt = performance.now();
  }

  rebuild() {
    this.colourOf = this.colours.painter(this.view.mode, this.planes);
    this.painter.rebuild(this.planes, this.grid, this.colourOf);
    this.repaint();
  }

  repaint() {
    if (!this.frameRequest) this.frameRequest = requestAnimationFrame(this.draw);
  }

  draw(now) {
    this.frameRequest = 0;
    if (!this.planes?.isWhole) return;
    const start = performance.now();
    const fades = this.painter.draw(this.planes, this.grid, this.colours, this.view, now);
    this.drawMs = performance.now() - start;
    this.drawMini();
    if (fades) this.fadeTimer ??= setTimeout(() => { this.fadeTimer = null; this.repaint(); }, FADE_MS);
  }

  drawMini() {
    const { grid, mini } = this;
    mini.hidden = grid.zoom <= 1.01;
    if (mini.hidden) return;
    fitCanvas(mini);
    const context = mini.getContext("2d"), scale = Math.min(mini.width / grid.columns, mini.height / grid.rows);
    context.clearRect(0, 0, mini.width, mini.height);
    context.drawImage(this.painter.image, 0, 0, grid.columns * scale, grid.rows * scale);
    const [left, right, top, bottom] = grid.window();
    context.strokeStyle = this.colours.text;
    context.lineWidth = 2;
    context.strokeRect(left * scale, top * scale, Math.max(4, (right - left) * scale), Math.max(4, (bottom - top) * scale));
  }

  everySoOften() {
    if (isDark(this.root) !== this.isDark) {
      this.setTheme();
      if (this.planes?.isWhole) this.rebuild();
    }
    if (!this.planes?.isWhole || document.hidden) return;
    this.showLegend();
    const isSorted = this.view.layout !== "physical", isAge = this.view.mode === "age";
    if ((isSorted || isAge) && !this.planes.isPast && performance.now() - this.orderAt >= SORT_MS) {
      this.reorder();
      this.rebuild();
    }
    if (performance.now() - (this.labelAt || 0) >= SPOKEN_MS) {
      this.labelAt = performance.now();
      const words = LABELLED.map((name) => `${number(this.planes.counts[STATE_NAMES.indexOf(name)])} ${name}`);
      this.canvas.setAttribute("aria-label", `page map: ${words.join(", ")}. Arrow keys move, Enter selects.`);
    }
  }

  showLegend() {
    const { counts } = this.planes, { mode } = this.view;
    if (this.legendMode !== `${mode} ${this.isDark}`) {
      this.legendMode = `${mode} ${this.isDark}`;
      this.legend.replaceChildren(...this.legendParts(mode));
    }
    for (const name of LABELLED) {
      const node = this.legend.querySelector(`[data-count=${name}]`);
      if (node) setText(node, number(counts[STATE_NAMES.indexOf(name)]));
    }
    if (this.isUnused() !== this.wasUnused) {
      this.wasUnused = this.isUnused();
      this.showStatus();
    }
    const extra = this.legend.querySelector(".figures");
    const load = this.tick ? ` · ${this.tick.running} running · ${this.tick.waiting} waiting` : "";
    if (extra) setText(extra, `revision ${this.planes.revision}${load} · draw ${this.drawMs.toFixed(1)} ms`);
  }

  legendParts(mode) {
    const parts = LABELLED.filter((name) => mode === "state" || name !== "active").map((name) => {
      const swatch = element("i", { class: `swatch ${name}`, style: `background: ${this.data.palette.states[name][this.isDark ? "dark" : "light"]}` });
      return element("span", {}, swatch, `${name} `, element("b", { "data-count": name }));
    });
    const scale = {
      fill: ["0", "full", (share) => share], refs: ["1 ref", "64", (share) => share],
      age: ["used now", "10 min ago", (share) => share],
    }[mode];
    if (scale) {
      const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => `rgb(${ramp(scale[2](share))})`);
      parts.unshift(element("span", {}, scale[0], element("i", { class: "ramp", style: `background: linear-gradient(90deg, ${stops})` }), scale[1]));
    }
    if (mode === "owner") parts.unshift(element("span", {}, "one hue per sequence"));
    parts.push(element("span", { class: "figures muted" }));
    return parts;
  }

  // status

  showStatus() {
    const { status, reason, age_ms: age } = this.status;
    const past = this.pastMs !== null && this.planes?.isPast;
    const shown = past ? "past" : status;
    this.node.dataset.state = shown;
    this.node.classList.toggle("stale", !["live", "resync", "past"].includes(shown));
    setText(this.statusText, shown === "live" ? `live ${this.data.hz} Hz` : shown === "stale" ? `stale ${seconds(age)}` : shown.replace("_", " "));
    this.bar.hidden = status !== "resync";
    const words = this.bannerWords(shown, reason);
    this.banner.hidden = !words;
    setText(this.banner, words);
    setText(this.pauseButton, this.pastMs !== null ? "live" : "pause");
  }

  bannerWords(shown, reason) {
    if (shown === "past") {
      const ms = this.planes.clock;
      const ago = this.tick ? this.tick.clock_ms - ms : 0;
      return `${clock(ms)}, ${seconds(Math.max(0, ago))} ago. End: back to live`;
    }
    if (shown === "live" && this.hello?.restarted_ms && this.tick && this.tick.clock_ms - this.hello.restarted_ms < 30_000) {
      return `worker restarted ${clock(this.hello.restarted_ms)}`;
    }
    if (shown === "live" && this.planes?.isWhole && this.planes.count <= 1) return "The pool has no pages: set num_pages.";
    if (shown === "live" && this.isUnused()) {
      return `No page holds anything yet. Send a prompt: ${this.data.prompt_command}`;
    }
    return ["live", "resync"].includes(shown) ? "" : reason || (shown === "connecting" ? "connecting" : "");
  }

  isUnused() {
    if (!this.planes?.isWhole) return false;
    const { counts, count } = this.planes;
    return counts[1] + counts[5] === count;
  }

  // what people do

  setMode(name) {
    this.view.mode = name;
    this.colour.press(name);
    if (this.planes?.isWhole) this.rebuild();
    if (this.planes?.isWhole) this.showLegend();
  }

  setLayout(name) {
    this.view.layout = name;
    this.layout.press(name);
    if (name === "request") this.feed?.send({ lists: 1 });
    if (!this.planes?.isWhole) return;
    this.reorder();
    this.rebuild();
  }

  togglePause() {
    if (this.pastMs !== null) this.goTime(null);
    else if (this.planes?.isWhole) this.goTime(this.planes.clock);
  }

  // A moment of the past, or null: the present.
  goTime(ms) {
    this.pastMs = ms;
    this.strip.setPast(ms);
    this.feed.send(ms === null ? { live: 1 } : { at: ms });
    this.showStatus();
  }

  moveTime(step) {
    const from = this.pastMs ?? this.planes?.clock;
    if (from) this.goTime(from + step);
  }

  showPage(page) {
    if (!this.planes || !(page >= 0 && page < this.planes.count)) return;
    this.grid.show(page, ratioOf());
    this.view.cursor = page;
    this.pick(page, false);
  }

  pick(page, isMore) {
    this.view.selected = page;
    this.ringOwner = page >= 0 && this.planes ? this.planes.owner[page] : 0;
    if (this.ringOwner) this.feed.send({ lists: 1 });
    this.findRings();
    this.repaint();
    if (page >= 0) setText(this.spoken, this.planes.describe(page).join(", "));
    this.givenSelected = page >= 0 ? page : null;
    this.setTriggerValue?.("picked", { page, more: isMore });
  }

  // What Python selected, once there is a map to show it on.
  select() {
    if (!this.planes?.isWhole || this.wanted === undefined) return;
    const page = this.wanted;
    this.wanted = undefined;
    if (page === null || page >= this.planes.count) {
      this.view.selected = -1;
    } else {
      this.view.selected = page;
      this.ringOwner = this.givenOwner || this.planes.owner[page];
      if (this.ringOwner) this.feed.send({ lists: 1 });
    }
    this.findRings();
    this.repaint();
  }

  findRings() {
    const pages = this.ringOwner ? this.planes?.lists.get(this.ringOwner) : null;
    this.view.rings = pages ? Array.from(pages).slice(0, 4096) : [];
    this.node.dataset.rings = this.view.rings.length;
  }

  hover(page, x, y) {
    this.tip.hidden = page < 0;
    if (page < 0) return;
    setText(this.tip, this.planes.describe(page).join("\n"));
    const ratio = ratioOf(), box = this.stage.getBoundingClientRect();
    this.tip.style.left = `${Math.min(x / ratio + 12, box.width - 190)}px`;
    this.tip.style.top = `${Math.min(y / ratio + 12, box.height - 70)}px`;
  }
}

