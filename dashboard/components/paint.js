// Planes → canvas. One pixel per page on an image beside, scaled up; what needs more than a colour on top.

import { ACTIVE, FREE, PINNED_BIT, RESERVED } from "./planes.js";
import { inkOn, mix, pixel } from "./colours.js";

const FLASH_MS = 600;
const FLASHES = Array.from({ length: 9 }, (_, level) => `rgba(255,255,255,${(0.85 * level) / 8})`);
const DETAIL_CELL = 6; // device pixels from which fill, notch and grid are drawn
const NUMBER_CELL = 30;

export class Painter {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.image = document.createElement("canvas");
    this.imageContext = this.image.getContext("2d");
    this.flashes = new Map(); // page → time
  }

  // Everything about colours or places changed: the image is made anew.
  rebuild(planes, grid, colourOf) {
    if (this.image.width !== grid.columns || this.image.height !== grid.rows) {
      this.image.width = grid.columns;
      this.image.height = grid.rows;
    }
    this.data = this.imageContext.createImageData(grid.columns, grid.rows);
    this.pixels = new Uint32Array(this.data.data.buffer);
    for (let cell = 0; cell < planes.count; cell++) this.pixels[cell] = colourOf(grid.pageOfCell(cell));
    this.imageContext.putImageData(this.data, 0, 0);
  }

  // Some pages changed: their pixels, and the rows they are in.
  update(pages, grid, colourOf, flashAt) {
    let low = Infinity, high = -1;
    for (const page of pages) {
      const cell = grid.cellOfPage(page);
      this.pixels[cell] = colourOf(page);
      const row = Math.floor(cell / grid.columns);
      if (row < low) low = row;
      if (row > high) high = row;
      if (flashAt && this.flashes.size < 4096) this.flashes.set(page, flashAt);
    }
    if (high >= 0) this.imageContext.putImageData(this.data, 0, 0, 0, low, grid.columns, high - low + 1);
  }

  // True while something still fades.
  draw(planes, grid, colours, view, now) {
    const context = this.context;
    context.fillStyle = `rgb(${colours.ground})`;
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    const [left, right, top, bottom] = grid.window();
    if (right > left && bottom > top) {
      if (grid.cell < 1) this.drawBins(planes, grid, colours, view);
      else this.drawCells(grid, left, right, top, bottom);
      if (grid.cell >= DETAIL_CELL) this.drawDetails(planes, grid, colours, view, [left, right, top, bottom]);
    }
    this.drawMarks(grid, colours);
    const fades = view.flash && this.drawFlashes(grid, now);
    this.drawRings(grid, view);
    return fades;
  }

  drawCells(grid, left, right, top, bottom) {
    const context = this.context, size = grid.cell;
    context.imageSmoothingEnabled = false;
    context.drawImage(
      this.image, left, top, right - left, bottom - top,
      grid.x + left * size, grid.y + top * size, (right - left) * size, (bottom - top) * size,
    );
    const used = grid.count - (grid.rows - 1) * grid.columns; // cells of the last row
    if (bottom === grid.rows && used < grid.columns) {
      context.fillRect(grid.x + used * size, grid.y + (grid.rows - 1) * size, (grid.columns - used) * size, size);
    }
  }

  // Less than a pixel per page: bins of k x k pages; the state most of them have, the less the darker.
  drawBins(planes, grid, colours, view) {
    const k = Math.ceil(1 / grid.cell);
    const columns = Math.ceil(grid.columns / k), rows = Math.ceil(grid.rows / k);
    if (!this.bins || this.bins.width !== columns || this.bins.height !== rows) {
      this.bins = new ImageData(columns, rows);
      this.binCanvas = document.createElement("canvas");
      this.binCanvas.width = columns;
      this.binCanvas.height = rows;
      this.binCounts = new Uint16Array(columns * rows * 8);
    }
    const counts = this.binCounts.fill(0);
    for (let row = 0, cell = 0; row < grid.rows; row++) {
      const line = Math.floor(row / k) * columns;
      for (let column = 0; column < grid.columns && cell < grid.count; column++, cell++) {
        counts[(line + Math.floor(column / k)) * 8 + planes.state[grid.order ? grid.order[cell] : cell]]++;
      }
    }
    const pixels = new Uint32Array(this.bins.data.buffer);
    for (let bin = 0; bin < pixels.length; bin++) pixels[bin] = binPixel(counts, bin * 8, colours);
    this.binCanvas.getContext("2d").putImageData(this.bins, 0, 0);
    this.context.imageSmoothingEnabled = false;
    this.context.drawImage(this.binCanvas, grid.x, grid.y, columns * k * grid.cell, rows * k * grid.cell);
  }

  drawDetails(planes, grid, colours, view, [left, right, top, bottom]) {
    const context = this.context, size = grid.cell;
    const shade = mix(colours.states[ACTIVE], colours.states[FREE], 0.72);
    for (let row = top; row < bottom; row++) {
      for (let column = left; column < right; column++) {
        const cell = row * grid.columns + column;
        if (cell >= grid.count) break;
        const page = grid.pageOfCell(cell), state = planes.state[page];
        const x = grid.x + column * size, y = grid.y + row * size;
        if (state === ACTIVE && view.mode === "state" && planes.fill[page] < planes.pageSize) {
          context.fillStyle = `rgb(${shade})`; // what is not filled yet
          context.fillRect(x, y, size, size * (1 - planes.fill[page] / planes.pageSize));
        }
        if (planes.bits[page] & PINNED_BIT && state !== FREE) this.drawNotch(x, y, size, colours);
        if (state === RESERVED) this.drawHatch(x, y, size, colours);
      }
    }
    if (view.grid) this.drawGrid(grid, colours, [left, right, top, bottom]);
    if (size >= NUMBER_CELL && grid.zoom > 1) this.drawNumbers(planes, grid, view, shade, [left, right, top, bottom]);
  }

  drawNotch(x, y, size, colours) {
    const context = this.context;
    context.fillStyle = `rgb(${colours.ground})`;
    context.beginPath();
    context.moveTo(x + size, y);
    context.lineTo(x + size, y + size * 0.45);
    context.lineTo(x + size * 0.55, y);
    context.fill();
  }

  drawHatch(x, y, size, colours) {
    const context = this.context;
    context.strokeStyle = `rgb(${colours.ground})`;
    context.lineWidth = Math.max(1, size / 10);
    context.beginPath();
    for (const share of [0.35, 0.7, 1.05]) {
      context.moveTo(x, y + size * share);
      context.lineTo(x + size * share, y);
    }
    context.stroke();
  }

  drawGrid(grid, colours, [left, right, top, bottom]) {
    const context = this.context, size = grid.cell;
    context.fillStyle = `rgb(${colours.ground})`;
    const width = Math.min(right * size, grid.columns * size), height = (bottom - top) * size;
    for (let column = left; column <= right; column++) context.fillRect(Math.round(grid.x + column * size), grid.y + top * size, 1, height);
    for (let row = top; row <= bottom; row++) context.fillRect(grid.x + left * size, Math.round(grid.y + row * size), width, 1);
  }

  drawNumbers(planes, grid, view, shade, [left, right, top, bottom]) {
    const context = this.context, size = grid.cell;
    context.font = `${Math.round(size / 4)}px sans-serif`;
    context.textBaseline = "top";
    for (let row = top; row < bottom; row++) {
      for (let column = left; column < right; column++) {
        const cell = row * grid.columns + column;
        if (cell >= grid.count) break;
        const page = grid.pageOfCell(cell), pixels = this.pixels[cell];
        const isShaded = view.mode === "state" && planes.state[page] === ACTIVE && planes.fill[page] < planes.pageSize / 2;
        context.fillStyle = inkOn(isShaded ? shade : [pixels & 255, (pixels >> 8) & 255, (pixels >> 16) & 255]);
        context.fillText(page, grid.x + column * size + 3, grid.y + row * size + 3, size - 6);
      }
    }
  }

  // Lines of a layout: after a cell, down to the end of its row and on.
  drawMarks(grid, colours) {
    if (!grid.marks.length || grid.cell < 2) return;
    const context = this.context, size = grid.cell;
    context.fillStyle = colours.text;
    for (const cell of grid.marks.slice(0, 2000)) {
      const x = grid.x + (cell % grid.columns) * size, y = grid.y + Math.floor(cell / grid.columns) * size;
      context.fillRect(x - 1, y, 2, size);
    }
  }

  drawFlashes(grid, now) {
    const context = this.context, size = Math.max(grid.cell, 2);
    for (const [page, at] of this.flashes) {
      const share = 1 - (now - at) / FLASH_MS;
      if (share <= 0) {
        this.flashes.delete(page);
        continue;
      }
      const [x, y] = grid.corner(page);
      if (x < -size || y < -size || x > grid.width || y > grid.height) continue;
      context.fillStyle = FLASHES[Math.ceil(share * 8)];
      context.fillRect(x, y, size, size);
    }
    return this.flashes.size > 0;
  }

  // Two lines, black and white: seen on every colour, in every kind of sight.
  drawRings(grid, view) {
    this.drawOutline(grid, view.rings);
    if (view.selected >= 0) this.drawRing(grid, view.selected, 3);
    if (view.cursor >= 0 && view.cursor !== view.selected) this.drawRing(grid, view.cursor, 1);
  }

  // Around pages that lie together goes one line: what is between them stays readable.
  drawOutline(grid, pages) {
    const context = this.context, size = grid.cell;
    const cells = new Set(pages.map((page) => grid.cellOfPage(page)));
    const path = new Path2D();
    for (const cell of cells) {
      const column = cell % grid.columns, x = grid.x + column * size, y = grid.y + Math.floor(cell / grid.columns) * size;
      const side = (isOpen, x1, y1, x2, y2) => {
        if (!isOpen) return;
        path.moveTo(x1, y1);
        path.lineTo(x2, y2);
      };
      side(!cells.has(cell - grid.columns), x, y, x + size, y);
      side(!cells.has(cell + grid.columns), x, y + size, x + size, y + size);
      side(column === 0 || !cells.has(cell - 1), x, y, x, y + size);
      side(column === grid.columns - 1 || !cells.has(cell + 1), x + size, y, x + size, y + size);
    }
    context.lineCap = "square";
    for (const [colour, line] of [["#000", 5], ["#fff", 2]]) {
      context.strokeStyle = colour;
      context.lineWidth = line;
      context.stroke(path);
    }
    context.lineCap = "butt";
  }

  drawRing(grid, page, width) {
    const context = this.context, [x, y] = grid.corner(page);
    const size = Math.max(grid.cell, 5), inset = (grid.cell - size) / 2;
    for (const [colour, line, grow] of [["#000", width + 2, 1], ["#fff", width, 0]]) {
      context.strokeStyle = colour;
      context.lineWidth = line;
      context.strokeRect(x + inset - grow, y + inset - grow, size + 2 * grow, size + 2 * grow);
    }
  }
}

function binPixel(counts, at, colours) {
  let total = 0, best = FREE, most = 0;
  for (let state = 1; state <= 5; state++) {
    total += counts[at + state];
    if (state !== FREE && counts[at + state] > most) {
      most = counts[at + state];
      best = state;
    }
  }
  if (!total) return pixel(colours.ground);
  if (!most) return colours.statePixels[FREE];
  const occupancy = 1 - counts[at + FREE] / total;
  return pixel(mix(colours.states[FREE], colours.states[best], 0.3 + 0.7 * occupancy));
}

