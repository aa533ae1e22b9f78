// Keyboard and pointer of the matrix: one stop for Tab, arrows inside, Enter or a click opens the details.

import { byId, setAttribute } from "./dom.js";

const NAME = -1; // place of the world's name in a row; members count from 0

export class MatrixKeys {
  #world = null; // where the stop is
  #at = NAME;
  #stop = null;

  /** `open(world, member, byKey)` shows the details. */
  constructor(matrix, open) {
    this.matrix = matrix;
    this.open = open;
    const grid = byId("matrix");
    grid.addEventListener("arranged", () => this.#keep());
    grid.addEventListener("focusin", (event) => this.#focused(event.target));
    grid.addEventListener("keydown", (event) => this.#key(event));
    grid.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row?.world === undefined || getSelection().type === "Range") return;
      const cell = event.target.closest(".cell");
      this.#go(row, cell ? cell.member : NAME);
      this.open(row.world, cell ? cell.member : null, false);
    });
  }

  /** Puts the focus on a world's row (the one that had it last if null). */
  focus(world = null) {
    const row = (world !== null && this.matrix.rowOf(world)) || this.#row() || this.matrix.shown[0];
    if (row?.isConnected) this.#go(row, row.world === this.#world ? this.#at : NAME);
  }

  #row() {
    return this.#world === null ? undefined : this.matrix.rowOf(this.#world);
  }

  /** There is always one row that Tab reaches. */
  #keep() {
    const row = this.#row();
    if (row?.isConnected && this.#stop?.isConnected) return;
    const first = row?.isConnected ? row : this.matrix.shown[0];
    if (first) this.#setStop(first, row?.isConnected ? this.#at : NAME);
  }

  #setStop(row, at) {
    const cells = row.parts.cells.children;
    this.#world = row.world;
    this.#at = Math.min(at, cells.length - 1);
    const stop = this.#at < 0 ? row.parts.name : cells[this.#at];
    if (stop !== this.#stop) {
      if (this.#stop) setAttribute(this.#stop, "tabindex", "-1");
      setAttribute(stop, "tabindex", "0");
      this.#stop = stop;
    }
    return stop;
  }

  #go(row, at) {
    const stop = this.#setStop(row, at);
    stop.focus({ preventScroll: true });
    row.scrollIntoView({ block: "nearest" });
  }

  #focused(target) {
    const row = target.closest(".row");
    if (row?.world === undefined) return;
    this.#setStop(row, target.classList.contains("cell") ? target.member : NAME);
  }

  #key(event) {
    const rows = this.matrix.shown;
    const row = this.#row();
    if (!row || event.altKey || event.metaKey) return;
    const y = rows.indexOf(row);
    const last = row.parts.cells.children.length - 1;
    const to = (next, at = this.#at) => this.#go(rows[Math.max(0, Math.min(rows.length - 1, next))], at);
    const steps = {
      ArrowUp: () => to(y - 1),
      ArrowDown: () => to(y + 1),
      ArrowLeft: () => this.#go(row, Math.max(NAME, this.#at - 1)),
      ArrowRight: () => this.#go(row, Math.min(last, this.#at + 1)),
      PageUp: () => to(y - 10),
      PageDown: () => to(y + 10),
      Home: () => (event.ctrlKey ? to(0, NAME) : this.#go(row, NAME)),
      End: () => (event.ctrlKey ? to(rows.length - 1, NAME) : this.#go(row, last)),
      Enter: () => this.open(row.world, this.#at < 0 ? null : this.#at, true),
      " ": () => this.open(row.world, this.#at < 0 ? null : this.#at, true),
    };
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    step();
  }
}
