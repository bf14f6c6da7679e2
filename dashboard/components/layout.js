// Where a page is drawn: the order of pages, and the grid with its zoom. Pure: no DOM.

import { ACTIVE, CACHED, FREE, PINNED } from "./planes.js";

export const LAYOUTS = ["physical", "request", "eviction", "age"];
export const MAX_SORTED_PAGES = 262_144; // more would hold the tab for over 50 ms
const MAX_CELL = 40; // CSS pixels, before zooming

// Order of a layout: a Uint32Array, cell → page; null: pages in their own order.
// `marks` are cells before which a line is drawn (the watermark of eviction, ends of sequences).
export function orderOf(layout, planes) {
  if (layout === "request") return byRequest(planes);
  if (layout === "eviction") return byEviction(planes);
  if (layout === "age") return byAge(planes);
  return { order: null, marks: [] };
}

function byRequest(planes) {
  const order = new Uint32Array(planes.count), seen = new Uint8Array(planes.count), marks = [];
  let at = 0;
  for (const owner of [...planes.lists.keys()].sort((a, b) => a - b)) {
    const start = at;
    for (const page of planes.lists.get(owner)) {
      if (page < planes.count && !seen[page]) {
        seen[page] = 1;
        order[at++] = page;
      }
    }
    if (at > start) marks.push(at);
  }
  for (const rank of [ACTIVE, PINNED, CACHED, 0, FREE]) {
    for (let page = 0; page < planes.count; page++) {
      const state = planes.state[page];
      const isOther = rank === 0 && ![ACTIVE, PINNED, CACHED, FREE].includes(state);
      if (!seen[page] && (state === rank || isOther)) order[at++] = page;
    }
  }
  return { order, marks };
}

// In use first, then what may be evicted, the next to go at its end; then what is free.
function byEviction(planes) {
  const rank = [5, 4, 0, 3, 1, 5];
  const order = sorted(planes, (page) => rank[planes.state[page]] ?? 5);
  let kept = 0, evictable = 0;
  for (let page = 0; page < planes.count; page++) {
    if (planes.state[page] === ACTIVE || planes.state[page] === PINNED) kept++;
    else if (planes.state[page] === CACHED) evictable++;
  }
  return { order, marks: [kept, kept + evictable] };
}

function byAge(planes) {
  const order = sorted(planes, (page) => (planes.state[page] === FREE ? 1 : 0));
  return { order, marks: [planes.count - planes.counts[FREE]] };
}

// By rank, then the most recently used first, then by number; one sort of doubles.
function sorted(planes, rankOf) {
  const count = planes.count;
  const keys = new Float64Array(count);
  for (let page = 0; page < count; page++) {
    const idle = Math.min(planes.idleMs(page), 4_000_000_000) >>> 2;
    keys[page] = (rankOf(page) * 1_000_000_000 + idle) * 262_144 + page;
  }
  keys.sort();
  const order = new Uint32Array(count);
  for (let cell = 0; cell < count; cell++) order[cell] = keys[cell] % 262_144;
  return order;
}

// The grid: cells in reading order, fitted into width x height, zoomed and moved. Device pixels.
export class Grid {
  constructor() {
    this.count = 0;
    this.width = this.height = 1;
    this.zoom = 1;
    this.x = this.y = 0; // of the grid's corner on the canvas
    this.order = null;
    this.place = null; // page → cell
    this.marks = [];
    this.resize(1, 1, 1, 1);
  }

  resize(count, width, height, ratio) {
    this.count = count;
    this.width = width;
    this.height = height;
    let columns = Math.max(1, Math.ceil(Math.sqrt((count * width) / height)));
    let cell = Math.min(width / columns, height / Math.ceil(count / columns), MAX_CELL * ratio);
    const fits = (size) => Math.ceil(count / Math.max(1, Math.floor(width / size))) * size <= height;
    // Whole pixels are crisp: take the largest size with which all cells fit.
    let whole = Math.min(Math.ceil(cell) + 1, Math.floor(MAX_CELL * ratio));
    while (whole >= 3 && !fits(whole)) whole--;
    if (whole >= 3) {
      cell = whole;
      columns = Math.max(1, Math.floor(width / cell));
    } else {
      columns = Math.max(1, Math.floor(width / cell));
      cell = Math.min(width / columns, height / Math.ceil(count / columns));
    }
    this.columns = Math.min(columns, Math.max(1, count));
    this.rows = Math.max(1, Math.ceil(count / this.columns));
    this.base = cell;
    this.clamp();
  }

  setOrder({ order, marks }) {
    this.order = order;
    this.marks = marks;
    this.place = null;
    if (order) {
      this.place = new Uint32Array(order.length);
      for (let cell = 0; cell < order.length; cell++) this.place[order[cell]] = cell;
    }
  }

  get cell() {
    return this.base * this.zoom;
  }

  pageOfCell(cell) {
    return this.order ? this.order[cell] : cell;
  }

  cellOfPage(page) {
    return this.place ? this.place[page] : page;
  }

  // The page at a point of the canvas, or -1.
  hit(x, y) {
    const column = Math.floor((x - this.x) / this.cell), row = Math.floor((y - this.y) / this.cell);
    if (column < 0 || column >= this.columns || row < 0) return -1;
    const cell = row * this.columns + column;
    return cell < this.count ? this.pageOfCell(cell) : -1;
  }

  // Corner of a page's cell on the canvas.
  corner(page) {
    const cell = this.cellOfPage(page);
    return [this.x + (cell % this.columns) * this.cell, this.y + Math.floor(cell / this.columns) * this.cell];
  }

  // Columns and rows that can be seen: [first column, last column, first row, last row], ends excluded.
  window() {
    const first = (offset) => Math.max(0, Math.floor(-offset / this.cell));
    const last = (offset, size, count) => Math.min(count, Math.ceil((size - offset) / this.cell));
    return [
      first(this.x), last(this.x, this.width, this.columns),
      first(this.y), last(this.y, this.height, this.rows),
    ];
  }

  zoomAt(factor, x, y) {
    const most = Math.max(1, (48 * 2) / this.base);
    const zoom = Math.min(Math.max(this.zoom * factor, 1), most);
    const ratio = zoom / this.zoom;
    this.x = x - (x - this.x) * ratio;
    this.y = y - (y - this.y) * ratio;
    this.zoom = zoom;
    this.clamp();
  }

  move(dx, dy) {
    this.x += dx;
    this.y += dy;
    this.clamp();
  }

  fit() {
    this.zoom = 1;
    this.x = this.y = 0;
  }

  // Puts a page into the middle, large enough to see.
  show(page, ratio) {
    if (this.cell < 10 * ratio) this.zoom = Math.max(1, (16 * ratio) / this.base);
    const [x, y] = this.corner(page);
    this.move(this.width / 2 - x, this.height / 2 - y);
  }

  clamp() {
    const limit = (offset, size, extent) => Math.min(0, Math.max(offset, Math.min(0, size - extent)));
    this.x = limit(this.x, this.width, this.columns * this.cell);
    this.y = limit(this.y, this.height, this.rows * this.cell);
  }
}
