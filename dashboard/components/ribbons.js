// One ribbon per sequence: its pages in token order. Cached, computed, and the part of the last page that is
// filled; shared pages are marked. Labels stand beside, ordinary text.

import { choice, element, fitCanvas, followed, isDark, loadStyles, located, number, ratioOf, setText } from "./dom.js";
import { mix, rgbOf } from "./colours.js";

const MIN_CELL = 9, MAX_CELL = 30, TALL = 16, GAP = 1, LINE = TALL + 3; // CSS pixels
const SORTS = ["newest", "pages", "wait"];
const SHOWN = ["running", "waiting", "preempted"];

export function mount(component) {
  const root = component.parentElement;
  root.kvatlas ??= new Ribbons(root, located(component.data));
  root.kvatlas.update(component);
  return () => {
    root.kvatlas?.close();
    root.kvatlas = null;
  };
}

class Ribbons {
  constructor(root, data) {
    loadStyles(root, data.modules);
    this.root = root;
    this.sort = SORTS[0];
    this.look = followed(this, "sort", SORTS, (name) => { this.sort = name; this.sorts.press(name); this.paint(); });
    this.shown = new Set(SHOWN);
    this.sorts = choice("Sort", SORTS, this.sort, (name) => this.look.pick(name));
    const boxes = SHOWN.map((name) => {
      const box = element("input", { type: "checkbox", onchange: () => { this.shown[box.checked ? "add" : "delete"](name); this.paint(); } });
      box.checked = true;
      return element("label", {}, box, name);
    });
    this.legend = element("div", { class: "legend" });
    this.total = element("span", { class: "figures muted" });
    this.list = element("div", { class: "ribbons", role: "list" });
    this.tip = element("div", { class: "tip", hidden: true });
    this.node = element("div", { class: "kvatlas", style: "position: relative" },
      element("div", { class: "controls" }, this.sorts.group, element("div", { class: "choice" }, ...boxes)),
      this.legend, this.list, this.tip);
    root.append(this.node);
    this.rows = new Map();
    this.resizes = new ResizeObserver(() => this.paint());
    this.resizes.observe(this.node);
  }

  close() {
    this.resizes.disconnect();
    this.node.remove();
  }

  update({ data, setTriggerValue }) {
    this.setTriggerValue = setTriggerValue;
    this.data = data;
    this.look.take(data.sort);
    this.paint();
  }

  sequences() {
    const kindOf = (one) => (one.state === "preempted" ? "preempted" : one.owner ? "running" : "waiting");
    const order = {
      newest: (a, b) => b.receive_ms - a.receive_ms, pages: (a, b) => b.pages.length - a.pages.length,
      wait: (a, b) => a.owner - b.owner || a.receive_ms - b.receive_ms,
    }[this.sort];
    return this.data.sequences.filter((one) => this.shown.has(kindOf(one))).sort(order);
  }

  paint() {
    if (!this.data) return;
    this.kind = isDark(this.root) ? "dark" : "light";
    this.paintLegend();
    const shown = this.sequences();
    const most = Math.max(1, ...shown.map((one) => one.pages.length));
    const room = this.list.querySelector("canvas")?.clientWidth || 300;
    this.cell = Math.max(MIN_CELL, Math.min(MAX_CELL, Math.floor(room / most) - GAP));
    const keep = new Set(shown.map((one) => one.key));
    for (const [key, row] of this.rows) {
      if (!keep.has(key)) {
        row.node.remove();
        this.rows.delete(key);
      }
    }
    shown.forEach((one, at) => {
      const row = this.rows.get(one.key) ?? this.addRow(one.key);
      row.one = one;
      if (this.list.children[at] !== row.node) this.list.insertBefore(row.node, this.list.children[at] ?? null);
      this.paintRow(row);
    });
    this.node.dataset.rows = shown.length;
    setText(this.total, this.data.total);
  }

  paintLegend() {
    if (this.legendKind === this.kind) return;
    this.legendKind = this.kind;
    const swatch = (colour, text, extra = "") => element("span", {}, element("i", { class: `swatch ${extra}`, style: `background: ${colour}` }), text);
    const { states } = this.data.palette;
    this.legend.replaceChildren(
      swatch(states.cached[this.kind], "from the cache"), swatch(states.active[this.kind], "computed"),
      swatch(`rgb(${this.shade()})`, "room in the last page"), element("span", {}, "dot: shared with another"), this.total);
  }

  shade() {
    const { states } = this.data.palette;
    return mix(rgbOf(states.active[this.kind]), rgbOf(states.free[this.kind]), 0.72);
  }

  addRow(key) {
    const canvas = element("canvas", { class: "wide" }), label = element("button", { type: "button", class: "name" });
    const words = element("span", { class: "muted words" });
    const row = { canvas, label, words, node: element("div", { class: "ribbon", role: "listitem", "data-key": key }, label, canvas, words) };
    label.addEventListener("click", () => this.setTriggerValue("picked", { request: row.one.request_id, owner: row.one.owner }));
    canvas.addEventListener("click", (event) => {
      const page = this.pageAt(row, event);
      if (page !== undefined) this.setTriggerValue("picked", { page });
    });
    canvas.addEventListener("pointermove", (event) => this.hover(row, event));
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; this.ringPage(undefined); });
    this.rows.set(key, row);
    return row;
  }

  paintRow(row) {
    const { one, canvas } = row;
    setText(row.label, one.name);
    row.label.title = `${one.request_id || one.name}: show its pages on the map`;
    setText(row.words, one.words);
    const columns = Math.max(1, Math.floor((canvas.clientWidth || 300) / (this.cell + GAP)));
    row.columns = columns;
    const lines = Math.max(1, Math.ceil(one.pages.length / columns));
    canvas.style.height = `${lines * LINE}px`;
    fitCanvas(canvas);
    const context = canvas.getContext("2d"), ratio = ratioOf(), { states } = this.data.palette;
    context.clearRect(0, 0, canvas.width, canvas.height);
    one.pages.forEach((page, at) => {
      const x = (at % columns) * (this.cell + GAP) * ratio, y = Math.floor(at / columns) * LINE * ratio, size = this.cell * ratio, tall = TALL * ratio;
      const isLast = at === one.pages.length - 1;
      context.fillStyle = at < one.cached ? states.cached[this.kind] : states.active[this.kind];
      context.fillRect(x, y, size, tall);
      if (isLast && one.tail < 1) {
        context.fillStyle = `rgb(${this.shade()})`;
        context.fillRect(x + size * one.tail, y, size * (1 - one.tail), tall);
      }
      if (one.shared.includes(at)) {
        context.fillStyle = at < one.cached && this.kind === "dark" ? "#000" : "#fff";
        const dot = 5 * ratio;
        context.fillRect(x + (size - dot) / 2, y + (tall - dot) / 2, dot, dot);
      }
      if (page === this.hovered) this.ring(context, x, y, size, tall);
    });
  }

  // Two lines, black and white, as on the map.
  ring(context, x, y, wide, tall) {
    const ratio = ratioOf();
    for (const [colour, line, inset] of [["#000", 4, 1], ["#fff", 2, 1]]) {
      context.strokeStyle = colour;
      context.lineWidth = line * ratio;
      context.strokeRect(x + inset * ratio, y + inset * ratio, wide - 2 * inset * ratio, tall - 2 * inset * ratio);
    }
  }

  // A page is ringed in every ribbon that has it.
  ringPage(page) {
    if (page === this.hovered) return;
    const before = this.hovered;
    this.hovered = page;
    for (const row of this.rows.values()) {
      if (row.one.pages.includes(page) || row.one.pages.includes(before)) this.paintRow(row);
    }
    this.node.dataset.hovered = page ?? "";
  }

  placeAt(row, event) {
    const column = Math.floor(event.offsetX / (this.cell + GAP)), line = Math.floor(event.offsetY / LINE);
    return column < row.columns ? line * row.columns + column : -1;
  }

  pageAt(row, event) {
    return row.one.pages[this.placeAt(row, event)];
  }

  hover(row, event) {
    const place = this.placeAt(row, event), page = row.one.pages[place];
    this.tip.hidden = page === undefined;
    this.ringPage(page);
    if (page === undefined) return;
    const others = [...this.rows.values()].filter((each) => each !== row && each.one.pages.includes(page)).map((each) => each.one.name.split(" ")[0]);
    const how = place < row.one.cached ? "from the cache" : "computed";
    const size = this.data.page_size;
    setText(this.tip, `page ${page} · ${how}\ntokens ${number(place * size)} … ${number(place * size + size - 1)}${others.length ? `\nalso in ${others.slice(0, 6).join(", ")}${others.length > 6 ? ", …" : ""}` : ""}`);
    const box = this.node.getBoundingClientRect();
    this.tip.style.left = `${Math.min(event.clientX - box.left + 12, box.width - 180)}px`;
    this.tip.style.top = `${event.clientY - box.top + 12}px`;
  }
}

