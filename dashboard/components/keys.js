// The keyboard on the focused map.

import { MODES } from "./colours.js";
import { LAYOUTS } from "./layout.js";
import { ratioOf } from "./dom.js";

const SECOND_MS = 1000;

export class Keys {
  constructor(map) {
    this.map = map;
    map.canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !map.planes?.isWhole) return;
      const action = this.actions()[event.key];
      if (!action) return;
      event.preventDefault();
      action(event);
    });
  }

  actions() {
    const { map } = this, { grid, view } = map;
    const middle = [map.canvas.width / 2, map.canvas.height / 2];
    const next = (names, name, isUsable = () => true) => {
      let at = names.indexOf(name);
      do at = (at + 1) % names.length; while (!isUsable(names[at]));
      return names[at];
    };
    return {
      ArrowLeft: () => this.move(-1),
      ArrowRight: () => this.move(1),
      ArrowUp: () => this.move(-grid.columns),
      ArrowDown: () => this.move(grid.columns),
      Enter: (event) => view.cursor >= 0 && map.pick(view.cursor, event.shiftKey),
      Escape: () => map.pick(-1, false),
      "+": () => this.zoom(1.5, middle),
      "=": () => this.zoom(1.5, middle),
      "-": () => this.zoom(1 / 1.5, middle),
      0: () => { grid.fit(); map.repaint(); },
      g: () => map.goTo.focus(),
      c: () => map.looks.colour.pick(next(MODES, view.mode)),
      l: () => map.looks.layout.pick(next(LAYOUTS, view.layout, (name) => !map.layout.buttons.get(name).disabled)),
      " ": () => map.togglePause(),
      "[": () => map.moveTime(-SECOND_MS),
      "]": () => map.moveTime(SECOND_MS),
      End: () => map.goTime(null),
    };
  }

  move(step) {
    const { map } = this, { grid, view } = map;
    const cell = view.cursor < 0 ? 0 : grid.cellOfPage(view.cursor) + step;
    if (cell < 0 || cell >= grid.count) return;
    view.cursor = grid.pageOfCell(cell);
    const [x, y] = grid.corner(view.cursor);
    const size = grid.cell;
    if (x < 0 || y < 0 || x + size > map.canvas.width || y + size > map.canvas.height) grid.show(view.cursor, ratioOf());
    map.hover(view.cursor, ...grid.corner(view.cursor));
    map.repaint();
  }

  zoom(factor, [x, y]) {
    this.map.grid.zoomAt(factor, x, y);
    this.map.repaint();
  }
}
