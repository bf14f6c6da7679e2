// Mouse and fingers on the map: hover, click, drag, wheel, double click, pinch.

import { ratioOf } from "./dom.js";

const DRAG_PIXELS = 4;

export class Pointer {
  constructor(map) {
    this.map = map;
    this.fingers = new Map();
    const { canvas, mini } = map;
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.up(event));
    canvas.addEventListener("pointercancel", (event) => this.fingers.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => map.hover(-1));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("dblclick", () => { map.grid.fit(); map.repaint(); });
    mini.addEventListener("pointerdown", (event) => this.jump(event));
  }

  at(event) {
    const ratio = ratioOf();
    return [event.offsetX * ratio, event.offsetY * ratio];
  }

  down(event) {
    if (!this.map.planes?.isWhole) return;
    this.map.canvas.setPointerCapture(event.pointerId);
    this.fingers.set(event.pointerId, this.at(event));
    this.start = this.at(event);
    this.isDrag = false;
  }

  move(event) {
    const { map } = this, [x, y] = this.at(event);
    if (!map.planes?.isWhole) return;
    const last = this.fingers.get(event.pointerId);
    if (!last) {
      map.hover(map.grid.hit(x, y), x, y);
      return;
    }
    if (this.fingers.size === 2) this.pinch(event.pointerId, last, [x, y]);
    else if (this.isDrag || Math.hypot(x - this.start[0], y - this.start[1]) > DRAG_PIXELS * ratioOf()) {
      this.isDrag = true;
      map.hover(-1);
      map.grid.move(x - last[0], y - last[1]);
    }
    this.fingers.set(event.pointerId, [x, y]);
    map.repaint();
  }

  up(event) {
    if (!this.fingers.delete(event.pointerId) || this.isDrag || this.fingers.size) return;
    const { map } = this, page = map.grid.hit(...this.at(event));
    map.canvas.focus({ preventScroll: true });
    if (page >= 0) {
      map.view.cursor = page;
      map.pick(page, event.shiftKey);
    }
  }

  wheel(event) {
    const { map } = this;
    // Without a zoom, and outwards, the page scrolls on.
    if (!map.planes?.isWhole || (event.deltaY > 0 && map.grid.zoom <= 1)) return;
    event.preventDefault();
    map.grid.zoomAt(Math.exp(-event.deltaY / 300), ...this.at(event));
    map.repaint();
  }

  pinch(id, last, now) {
    this.isDrag = true;
    const [other] = [...this.fingers].filter(([each]) => each !== id).map(([, point]) => point);
    const before = Math.hypot(last[0] - other[0], last[1] - other[1]);
    const after = Math.hypot(now[0] - other[0], now[1] - other[1]);
    if (before > 0) this.map.grid.zoomAt(after / before, (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
  }

  // A press on the minimap goes there.
  jump(event) {
    const { grid, mini } = this.map, ratio = ratioOf();
    const scale = Math.min(mini.width / grid.columns, mini.height / grid.rows);
    const column = (event.offsetX * ratio) / scale, row = (event.offsetY * ratio) / scale;
    grid.x = grid.width / 2 - column * grid.cell;
    grid.y = grid.height / 2 - row * grid.cell;
    grid.clamp();
    this.map.repaint();
  }
}
