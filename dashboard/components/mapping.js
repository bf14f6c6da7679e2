// How a token gets to a lane: logical pages → page → slots → K and V of one head, coloured by lane.

import { element, fitCanvas, isDark, loadStyles, located, ratioOf, setText } from "./dom.js";
import { inkOn, mix, ownerColour, rgbOf } from "./colours.js";

const BOX = 38, MIN_BOX = 34; // CSS pixels
const MAX_LINES = 16; // of the lanes' pictures: what follows repeats them

export function mount(component) {
  const root = component.parentElement;
  root.kvatlas ??= new Mapping(root, located(component.data));
  root.kvatlas.update(component.data);
  return () => {
    root.kvatlas?.close();
    root.kvatlas = null;
  };
}

class Mapping {
  constructor(root, data) {
    loadStyles(root, data.modules);
    this.root = root;
    this.lane = -1;
    this.pages = element("canvas", { class: "wide", role: "img", "aria-label": "pages of the sequence" });
    this.slots = element("canvas", { class: "wide", role: "img", "aria-label": "slots of the page" });
    this.keys = element("canvas", { class: "wide", style: "height: 220px", role: "img", "aria-label": "keys by lane" });
    this.values = element("canvas", { class: "wide", style: "height: 220px", role: "img", "aria-label": "values by lane" });
    this.words = element("div", { class: "muted", "aria-live": "polite" });
    this.titles = ["Pages of the sequence, in token order", "Slots of that page", "", ""].map((text) => element("b", {}, text));
    const both = element("div", { class: "pair" },
      element("div", {}, this.titles[2], this.keys), element("div", {}, this.titles[3], this.values));
    this.node = element("div", { class: "kvatlas" }, this.titles[0], this.pages, this.titles[1], this.slots, both, this.words);
    root.append(this.node);
    for (const [canvas, name] of [[this.keys, "key_lanes"], [this.values, "value_lanes"]]) {
      canvas.addEventListener("pointermove", (event) => this.hover(canvas, this.data[name], event));
      canvas.addEventListener("pointerleave", () => this.show(-1));
    }
    this.resizes = new ResizeObserver(() => this.paint());
    this.resizes.observe(this.node);
  }

  close() {
    this.resizes.disconnect();
    this.node.remove();
  }

  update(data) {
    this.data = data;
    this.paint();
  }

  hover(canvas, lanes, event) {
    const row = Math.floor((event.offsetY / canvas.clientHeight) * Math.min(MAX_LINES, lanes.length));
    const column = Math.floor((event.offsetX / canvas.clientWidth) * lanes[0].length);
    this.show(lanes[row]?.[column] ?? -1);
  }

  show(lane) {
    if (lane === this.lane) return;
    this.lane = lane;
    this.paint();
  }

  paint() {
    if (!this.data) return;
    const { data } = this;
    this.dark = isDark(this.root);
    this.kind = this.dark ? "dark" : "light";
    setText(this.titles[2], `K of one head: ${data.kernel_page_size} tokens →, ${data.head_size} numbers ↓ in vecs of ${data.vec_size}${this.rest(data.key_lanes)}`);
    setText(this.titles[3], `V of one head: ${data.kernel_page_size} tokens → in vecs of ${data.value_vec_size}, ${data.head_size} numbers ↓${this.rest(data.value_lanes)}`);
    this.paintPages();
    this.paintSlots();
    this.paintLanes(this.keys, data.key_lanes.slice(0, MAX_LINES));
    this.paintLanes(this.values, data.value_lanes.slice(0, MAX_LINES));
    setText(this.words, this.lane < 0 ? `warp ${data.warp}: 32 lanes, one colour each` : this.laneWords());
    this.node.dataset.lane = this.lane;
  }

  // How many lines of a picture are not drawn.
  rest(lanes) {
    return lanes.length > MAX_LINES ? `, the first ${MAX_LINES} of ${lanes.length} lines` : "";
  }

  laneWords() {
    const { data, lane } = this;
    const tokens = [...new Set(data.key_lanes.flatMap((row) => row.map((each, token) => (each === lane ? token : -1)).filter((token) => token >= 0)))];
    const vecs = data.key_lanes.map((row, vec) => (row.includes(lane) ? vec : -1)).filter((vec) => vec >= 0);
    const rows = data.value_lanes.map((row, at) => (row.includes(lane) ? at : -1)).filter((at) => at >= 0);
    const few = (list) => (list.length > 6 ? `${list.slice(0, 6).join(", ")}, …` : list.join(", "));
    return `lane ${lane} of warp ${data.warp}: keys of token ${tokens.join(", ")}, vecs ${few(vecs)}; values at places ${few(rows)} of the head`;
  }

  // Boxes with a number in each, in as many lines as it takes to read them.
  paintBoxes(canvas, count, numberOf, colourOf, isMarked) {
    const ratio = ratioOf(), columns = Math.min(count, Math.max(1, Math.floor(canvas.clientWidth / MIN_BOX)));
    const lines = Math.ceil(count / columns), tall = BOX * ratio;
    canvas.style.height = `${lines * BOX}px`;
    fitCanvas(canvas);
    const context = canvas.getContext("2d"), wide = canvas.width / columns;
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.textBaseline = "middle";
    context.textAlign = "center";
    for (let at = 0; at < count; at++) {
      const rgb = colourOf(at), x = (at % columns) * wide, y = Math.floor(at / columns) * tall;
      context.fillStyle = `rgb(${rgb})`;
      context.fillRect(x + 1, y + 2 * ratio, wide - 2, tall - 4 * ratio);
      if (isMarked(at)) {
        for (const [colour, line] of [["#000", 4], ["#fff", 2]]) {
          context.strokeStyle = colour;
          context.lineWidth = line * ratio;
          context.strokeRect(x + 2 * ratio, y + 3 * ratio, wide - 4 * ratio, tall - 6 * ratio);
        }
      }
      const text = String(numberOf(at));
      context.font = `${Math.min(12 * ratio, (wide / text.length) * 1.4)}px sans-serif`;
      context.fillStyle = inkOn(rgb);
      context.fillText(text, x + wide / 2, y + tall / 2, wide - 4);
    }
  }

  paintPages() {
    const { pages, position, palette } = this.data, active = rgbOf(palette.states.active[this.kind]);
    this.paintBoxes(this.pages, pages.length, (at) => pages[at], () => active, (at) => at === position);
  }

  paintSlots() {
    const { first_slot: first, page_size: size, filled, palette } = this.data;
    const active = rgbOf(palette.states.active[this.kind]), free = mix(active, rgbOf(palette.states.free[this.kind]), 0.72);
    const count = Math.min(size, 64);
    this.paintBoxes(this.slots, count, (at) => first + at, (at) => (at < filled ? active : free), () => false);
  }

  paintLanes(canvas, lanes) {
    fitCanvas(canvas);
    const context = canvas.getContext("2d"), wide = canvas.width / lanes[0].length, tall = canvas.height / lanes.length;
    const ground = rgbOf(this.data.palette.ground.background[this.kind]);
    lanes.forEach((row, y) => row.forEach((lane, x) => {
      const own = ownerColour(lane * 3 + 1, this.dark);
      const rgb = this.lane < 0 || this.lane === lane ? own : mix(own, ground, 0.82);
      context.fillStyle = `rgb(${rgb})`;
      context.fillRect(x * wide, y * tall, Math.ceil(wide) - 1, Math.ceil(tall) - (tall > 4 ? 1 : 0));
      if (wide > 14 && tall > 12) {
        context.fillStyle = inkOn(rgb);
        context.font = `${Math.min(11 * ratioOf(), tall * 0.8)}px sans-serif`;
        context.textBaseline = "middle";
        context.fillText(lane, x * wide + 4, y * tall + tall / 2, wide - 6);
      }
    }));
  }
}

