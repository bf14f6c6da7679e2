// The prefix tree as an icicle: width = pages, one row per run of pages without a branch. Ghosts are hatched.

import { choice, element, fitCanvas, followed, isDark, loadStyles, located, number, ratioOf, setText } from "./dom.js";
import { inkOn, mix, ramp, refsShare, ageShare, rgbOf } from "./colours.js";
import { seconds } from "./planes.js";

const MIN_ROW = 30, MAX_ROW = 104, MIN_LABEL = 20; // CSS pixels
const MODES = ["last use", "hits", "refs"];

export function mount(component) {
  const root = component.parentElement;
  root.kvatlas ??= new Icicle(root, located(component.data));
  root.kvatlas.update(component);
  return () => {
    root.kvatlas?.close();
    root.kvatlas = null;
  };
}

// Nodes with `x`, `width` in 0..1 below `top`; children share their parent's width by their pages.
export function place(nodes, top) {
  const byId = new Map(nodes.map((node) => [node.id, node])), children = new Map();
  for (const node of nodes) {
    const key = byId.has(node.parent) ? node.parent : null;
    if (!children.has(key)) children.set(key, []);
    children.get(key).push(node);
  }
  const placed = [];
  const lay = (list, x, width, depth) => {
    const total = list.reduce((sum, node) => sum + node.weight, 0);
    for (const node of list) {
      const share = (width * node.weight) / total;
      placed.push({ node, x, width: share, depth });
      lay(children.get(node.id) ?? [], x, share, depth + 1);
      x += share;
    }
  };
  lay(top !== null && byId.has(top) ? [byId.get(top)] : children.get(null) ?? [], 0, 1, 0);
  return placed;
}

class Icicle {
  constructor(root, data) {
    loadStyles(root, data.modules);
    this.root = root;
    this.mode = MODES[0];
    this.top = null;
    this.look = followed(this, "shade", MODES, (name) => { this.mode = name; this.modes.press(name); this.paint(); });
    this.modes = choice("Colour", MODES, this.mode, (name) => this.look.pick(name));
    this.back = element("button", { type: "button", onclick: () => this.zoom(null) }, "whole tree");
    this.words = element("span", { class: "muted" });
    this.legend = element("div", { class: "legend" });
    this.canvas = element("canvas", { class: "wide", tabindex: 0, role: "img" });
    this.tip = element("div", { class: "tip", hidden: true });
    this.node = element("div", { class: "kvatlas", style: "position: relative" },
      element("div", { class: "controls" }, this.modes.group, this.back, this.words), this.canvas, this.legend, this.tip);
    root.append(this.node);
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    this.canvas.addEventListener("click", (event) => this.click(event));
    this.canvas.addEventListener("contextmenu", (event) => this.copy(event));
    this.canvas.addEventListener("keydown", (event) => event.key === "Escape" && this.zoom(null));
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
    this.look.take(data.shade);
    this.paint();
  }

  zoom(id) {
    this.top = id;
    this.paint();
  }

  paint() {
    if (!this.data) return;
    this.kind = isDark(this.root) ? "dark" : "light";
    this.placed = place(this.data.nodes, this.top);
    if (this.top !== null && !this.placed.length) this.top = null;
    const depth = Math.max(1, ...this.placed.map(({ depth }) => depth + 1));
    this.row = Math.min(MAX_ROW, Math.max(MIN_ROW, Math.floor((window.innerHeight * 0.6) / depth)));
    this.canvas.style.height = `${depth * this.row}px`;
    fitCanvas(this.canvas);
    this.canvas.setAttribute("aria-label", this.data.words);
    setText(this.words, this.data.words);
    this.back.hidden = this.top === null;
    this.font = getComputedStyle(this.node).fontFamily;
    this.paintLegend();
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    for (const each of this.placed) this.paintNode(context, each);
    this.node.dataset.nodes = this.placed.length;
  }

  paintLegend() {
    const key = `${this.mode} ${this.kind}`;
    if (this.legendKey === key) return;
    this.legendKey = key;
    const { results, states } = this.data.palette;
    const [from, to] = { "last use": ["used 10 min ago", "now"], hits: ["no hit", "1,000 hits"], refs: ["1 reference", "64"] }[this.mode];
    const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => `rgb(${ramp(share)})`);
    const swatch = (colour, extra, text) => element("span", {}, element("i", { class: `swatch ${extra}`, style: `background-color: ${colour}` }), text);
    this.legend.replaceChildren(
      element("span", {}, from, element("i", { class: "ramp", style: `background: linear-gradient(90deg, ${stops})` }), to),
      ...(this.mode === "refs" ? [swatch(states.cached[this.kind], "", "not in use")] : []),
      swatch(results.miss_evicted[this.kind], "hatched", "evicted, and asked for again"),
      swatch(states.pinned[this.kind], "", "pinned: a line above"));
  }

  paintNode(context, { node, x, width, depth }) {
    const ratio = ratioOf(), left = x * this.canvas.width, wide = Math.max(1, width * this.canvas.width - ratio);
    const top = depth * this.row * ratio, tall = (this.row - 2) * ratio;
    const rgb = this.colour(node);
    context.fillStyle = `rgb(${rgb})`;
    context.fillRect(left, top, wide, tall);
    if (node.ghost) this.hatch(context, left, top, wide, tall);
    if (node.pinned) {
      context.fillStyle = this.data.palette.states.pinned[this.kind];
      context.fillRect(left, top, wide, 3 * ratio);
    }
    if (wide < MIN_LABEL * ratio) return;
    context.font = `${12 * ratio}px ${this.font}`;
    context.textBaseline = "middle";
    const text = [node.label, node.label.split(" · ")[0], String(node.pages)].find((each) => context.measureText(each).width < wide - 10 * ratio);
    if (!text) return;
    if (node.ghost) { // words on the hatching: on a ground of their own
      context.fillStyle = this.data.palette.ground.background[this.kind];
      context.fillRect(left + 2 * ratio, top + tall / 2 - 9 * ratio, context.measureText(text).width + 6 * ratio, 18 * ratio);
    }
    context.fillStyle = node.ghost ? this.data.palette.ground.text[this.kind] : inkOn(rgb);
    context.fillText(text, left + 5 * ratio, top + tall / 2);
  }

  hatch(context, left, top, wide, tall) {
    context.save();
    context.beginPath();
    context.rect(left, top, wide, tall);
    context.clip();
    context.strokeStyle = this.data.palette.ground.background[this.kind];
    context.lineWidth = 2 * ratioOf();
    context.beginPath();
    for (let x = left - tall; x < left + wide; x += 8 * ratioOf()) {
      context.moveTo(x, top + tall);
      context.lineTo(x + tall, top);
    }
    context.stroke();
    context.restore();
  }

  colour(node) {
    const { palette } = this.data;
    if (node.ghost) return rgbOf(palette.results.miss_evicted[this.kind]);
    if (node.rest) return mix(rgbOf(palette.states.free[this.kind]), rgbOf(palette.ground.text[this.kind]), 0.2);
    if (this.mode === "hits") return ramp(Math.log2(1 + node.hits) / 10);
    if (this.mode === "refs") return node.refs ? ramp(refsShare(node.refs)) : rgbOf(palette.states.cached[this.kind]);
    return ramp(1 - ageShare(node.idle_ms));
  }

  at(event) {
    const x = event.offsetX / this.canvas.clientWidth, depth = Math.floor(event.offsetY / this.row);
    return this.placed.find((each) => each.depth === depth && x >= each.x && x < each.x + each.width);
  }

  hover(event) {
    const found = this.at(event);
    this.tip.hidden = !found;
    if (!found) return;
    const { node } = found, lines = [`${number(node.pages)} pages`];
    if (node.ghost) lines.push(`evicted ${seconds(node.idle_ms)} ago`, `computed again ${node.returns} times`);
    else if (!node.rest) lines.push(`${number(node.hits)} hits · ${node.refs} refs`, `used ${seconds(node.idle_ms)} ago`, node.fingerprint);
    setText(this.tip, lines.join("\n"));
    const box = this.node.getBoundingClientRect();
    this.tip.style.left = `${Math.min(event.clientX - box.left + 12, box.width - 200)}px`;
    this.tip.style.top = `${event.clientY - box.top + 12}px`;
  }

  click(event) {
    const found = this.at(event);
    if (!found) return;
    const isTop = found.node.id === this.top;
    this.zoom(isTop ? null : found.node.id);
    if (found.node.page !== null && found.node.page !== undefined) this.setTriggerValue("picked", { page: found.node.page });
  }

  copy(event) {
    const found = this.at(event);
    if (!found?.node.fingerprint) return;
    event.preventDefault();
    navigator.clipboard?.writeText(found.node.fingerprint);
  }
}
