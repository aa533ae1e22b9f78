// Worlds × members: one row for each world, one cell for each member.

import { drawCell, LETTERS, MEANINGS } from "./cells.js";
import { eachSecond, now, showAge } from "./clock.js";
import { arrange, byId, h, setAttribute, setHidden, setText } from "./dom.js";
import { soon } from "./frames.js";
import {
  faultWords,
  missingRanks,
  openFaults,
  operationName,
  stuckOperation,
  urgency,
  worldTrouble,
} from "./trouble.js";
import { byName, percent, ranks, several } from "./words.js";

export class Matrix {
  #rows = new Map(); // world's name → row
  #order = [];
  #sort = "trouble";
  #filter = "";
  #selected = null;

  constructor(model) {
    this.model = model;
    this.body = byId("rows");
    legend();
    eachSecond(() => this.#reorder());
  }

  /** Draws these worlds, each in one of the next frames. */
  changed(names) {
    for (const name of names) soon(`world ${name}`, () => this.#draw(name));
    soon("order of worlds", () => this.#reorder());
  }

  sortBy(order) {
    this.#sort = order;
    this.#reorder();
  }

  filter(text) {
    this.#filter = text.trim().toLowerCase();
    this.#reorder();
  }

  /** Marks the world whose details are shown (null: none). */
  select(name) {
    for (const [world, selected] of [
      [this.#selected, "false"],
      [name, "true"],
    ]) {
      const row = this.#rows.get(world);
      if (row) setAttribute(row, "aria-selected", selected);
    }
    this.#selected = name;
  }

  /** The rows as they are seen. */
  get shown() {
    return this.#order;
  }

  rowOf(name) {
    return this.#rows.get(name);
  }

  #draw(name) {
    const world = this.model.worlds.get(name);
    if (!world) {
      this.#rows.delete(name);
      return;
    }
    let row = this.#rows.get(name);
    if (!row) {
      row = makeRow(name);
      this.#rows.set(name, row);
      setAttribute(row, "aria-selected", String(name === this.#selected));
      soon("order of worlds", () => this.#reorder());
    }
    drawRow(row, world);
  }

  #reorder() {
    const at = now();
    const worlds = [...this.model.worlds.values()].filter(
      (world) => this.#rows.has(world.name) && this.#matches(world),
    );
    const faults = openFaults(this.model);
    const urgent = new Map(worlds.map((world) => [world.name, urgency(world, at)]));
    if (this.#sort === "trouble")
      worlds.sort((a, b) => urgent.get(a.name) - urgent.get(b.name) || byName(a.name, b.name));
    else worlds.sort((a, b) => byName(a.name, b.name));
    this.#order = worlds.map((world) => this.#rows.get(world.name));
    for (const world of worlds) {
      const row = this.#rows.get(world.name);
      setAttribute(row, "data-urgency", urgent.get(world.name));
      setText(row.parts.note, noteOf(world, at, faults.get(world.name)));
    }
    arrange(this.body, this.#order);
    byId("matrix").style.setProperty("--most", Math.max(4, ...worlds.map((world) => world.members.length)));
    this.#count();
  }

  #count() {
    const all = this.model.worlds.size;
    const shown = this.#order.length;
    setText(byId("worlds-shown"), shown === all ? String(all) : `${shown} of ${all}`);
    setText(byId("worlds-empty"), all ? `No world matches "${this.#filter}".` : "No world yet.");
    setHidden(byId("worlds-empty"), shown > 0 || !this.model.loaded);
    setAttribute(byId("matrix"), "aria-rowcount", shown + 1);
    byId("matrix").dispatchEvent(new Event("arranged"));
  }

  #matches(world) {
    if (!this.#filter) return true;
    const text = [world.name, world.state, world.cause, world.note, ...world.members.map((m) => m.process)]
      .join("\n")
      .toLowerCase();
    return this.#filter.split(/\s+/).every((word) => text.includes(word));
  }
}

function makeRow(name) {
  const part = (role, className, ...children) => h("div", { role, class: className }, ...children);
  const state = h("span", { class: "badge" });
  const generation = h("span", { class: "generation" });
  const parts = {
    name: h("div", { role: "rowheader", class: "name", tabindex: "-1", text: name, title: name }),
    state,
    generation,
    size: part("gridcell", "size"),
    age: part("gridcell", "age"),
    cells: part("none", "cells"),
    note: part("gridcell", "note"),
  };
  const row = h(
    "div",
    { role: "row", class: "row" },
    parts.name,
    part("gridcell", "state", state, generation),
    parts.size,
    parts.age,
    parts.cells,
    parts.note,
  );
  row.parts = parts;
  row.world = name;
  return row;
}

function drawRow(row, world) {
  const { parts } = row;
  setAttribute(row, "data-state", world.state);
  setAttribute(parts.state, "data-state", world.state);
  setText(parts.state, world.state);
  setText(parts.generation, `gen ${world.generation}`);
  setText(parts.size, sizeOf(world));
  showAge(parts.age, world.since);
  const { cells } = parts;
  while (cells.children.length > world.members.length) cells.lastChild.remove();
  world.members.forEach((member, at) => {
    let cell = cells.children[at];
    if (!cell) {
      cell = h("span", { role: "gridcell", class: "cell", tabindex: "-1" });
      cell.member = at;
      cells.append(cell);
    }
    drawCell(cell, member);
  });
}

/** "4"; of a range "3 of 2:8". */
export const sizeOf = (world) => (world.sizes ? `${world.size} of ${world.sizes}` : String(world.size));

/** What is to be said of a world in one line. */
function noteOf(world, at, fault) {
  const parts = [];
  const trouble = worldTrouble(world);
  if (trouble?.[1]) parts.push(trouble[1]);
  else if (world.left && world.cause) parts.push(world.cause);
  if (fault && world.state === "joining") parts.push(faultWords(fault));
  const stuck = stuckOperation(world, at);
  if (stuck) parts.push(`${operationName(stuck)} waits for ${ranks(missingRanks(stuck)) || "its members"}`);
  if (world.note && world.note !== trouble?.[1]) parts.push(world.note);
  if (world.candidates) parts.push(`${world.candidates} waiting to be let in`);
  for (const m of world.members)
    if (m.total > 0)
      parts.push(`rank ${m.rank < 0 ? "?" : m.rank} has ${percent(m.received, m.total)} % of the state`);
  if (parts.length > 4) parts.splice(3, parts.length, several(parts.length - 3, "more note"));
  return parts.join("; ");
}

function legend() {
  const items = Object.entries(MEANINGS).map(([state, meaning]) =>
    h(
      "span",
      { class: "legend-item" },
      h("span", { class: "cell", "data-state": state, "aria-hidden": "true", text: `${LETTERS[state]}0` }),
      h("span", { text: meaning }),
    ),
  );
  byId("legend").append(h("span", { class: "muted", text: "letter and rank:" }), ...items);
}
