// Puts the parts together: the stream changes the model, the model's changes are drawn.

import { startClock, synchronise } from "./clock.js";
import { Connection } from "./connection.js";
import { byId, setAttribute } from "./dom.js";
import { drawEvents, startEvents } from "./events.js";
import { drawFaults, startFaults } from "./faults.js";
import { soon } from "./frames.js";
import { Head } from "./head.js";
import { startKeys } from "./keys.js";
import { LogPanel } from "./logpanel.js";
import { Matrix } from "./matrix.js";
import { MatrixKeys } from "./matrixkeys.js";
import { Model } from "./model.js";
import { Panel } from "./panel.js";
import { drawProcesses, startProcesses } from "./processes.js";
import { Tooltip } from "./tooltip.js";
import { WorldPanel } from "./worldpanel.js";

const model = new Model();
const matrix = new Matrix(model);
const tooltip = new Tooltip(model);
const filter = byId("filter");

function filterBy(text) {
  filter.value = filter.value === text ? "" : text;
  matrix.filter(filter.value);
}

const head = new Head(model, filterBy);
const openLog = (process) => panel.open("log", process, { focus: true });
const worldPanel = new WorldPanel(model, { openLog, focusBack: (name) => keys.focus(name) });
const panel = new Panel(
  { world: worldPanel, log: new LogPanel(model, () => byId("processes").querySelector("button")?.focus()) },
  (shown) => {
    matrix.select(shown?.kind === "world" ? shown.name : null);
  },
);
const keys = new MatrixKeys(matrix, (world, member, byKey) => {
  tooltip.hide();
  panel.open("world", world, { focus: byKey });
  worldPanel.point(member);
});

filter.addEventListener("input", () => matrix.filter(filter.value));
for (const [id, order] of [
  ["by-trouble", "trouble"],
  ["by-name", "name"],
]) {
  byId(id).addEventListener("click", () => {
    for (const other of ["by-trouble", "by-name"])
      setAttribute(byId(other), "aria-pressed", String(other === id));
    matrix.sortBy(order);
  });
}

function changed({ worlds, processes, faults, events }) {
  soon("head", () => head.draw());
  matrix.changed(worlds);
  if (processes) soon("processes", () => drawProcesses(model));
  if (faults) soon("faults", () => drawFaults(model));
  if (events) soon("events", () => drawEvents(model));
  const { shown } = panel;
  if (shown && (shown.kind === "log" || processes || worlds.has(shown.name)))
    soon("panel", () => panel.draw());
}

const connection = new Connection({
  view(view) {
    synchronise(view.now, { fresh: true });
    changed(model.replace(view));
  },
  patch(patch) {
    synchronise(patch.now);
    changed(model.patch(patch));
  },
  state: (name) => head.connected(name),
});

startProcesses(model, openLog);
startFaults(model);
startEvents();
startKeys({ filter, matrix, tooltip, panel, matrixKeys: keys });
startClock();
panel.follow();
connection.start();
