// The table of processes: those in trouble first, then by rank.

import { showAge } from "./clock.js";
import { byId, h, keyed, setAttribute, setHidden, setText } from "./dom.js";
import { byName } from "./words.js";

const SHOWN = 200; // rows; the others after a press of "Show all"

const URGENT = { lost: 0, failed: 0, restarting: 1, starting: 2, retiring: 2 };
const COLUMNS = ["Rank", "Role", "State", "PID", "Host", "Restarts", "Last event", "For", ""];

let all = false;

export function startProcesses(model, openLog) {
  byId("processes-more").addEventListener("click", () => {
    all = true;
    drawProcesses(model);
  });
  byId("process-rows").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) openLog(button.closest("tr").process);
  });
}

export function drawProcesses(model) {
  const processes = [...model.processes.values()].sort(
    (a, b) =>
      (URGENT[a.state] ?? 3) - (URGENT[b.state] ?? 3) ||
      (a.rank ?? Infinity) - (b.rank ?? Infinity) ||
      byName(a.id, b.id),
  );
  const shown = all ? processes : processes.slice(0, SHOWN);
  keyed(byId("process-rows"), shown, (process) => process.id, makeRow, drawRow);
  setText(
    byId("processes-shown"),
    processes.length === shown.length ? String(processes.length) : `${shown.length} of ${processes.length}`,
  );
  setHidden(byId("processes-more"), processes.length === shown.length);
  setHidden(byId("processes-empty"), processes.length > 0 || !model.loaded);
}

function makeRow(process) {
  const cells = COLUMNS.map((name) => h("td", { "data-label": name }));
  cells[2].append(h("span", { class: "badge" }));
  cells[8].append(
    h("button", {
      type: "button",
      class: "small",
      text: "Log",
      "aria-label": `Log of ${process.role || process.id}`,
    }),
  );
  const row = h("tr", {}, ...cells);
  row.process = process.id;
  return row;
}

function drawRow(row, process) {
  const [rank, role, state, pid, host, restarts, last, age] = row.children;
  setText(rank, process.rank === null ? "–" : String(process.rank));
  setText(role, process.role || "–");
  setAttribute(role, "title", process.role || null);
  setText(state.firstChild, process.state);
  setAttribute(state.firstChild, "data-state", process.state);
  setText(pid, String(process.pid));
  setText(host, process.host);
  setAttribute(host, "title", process.host);
  setText(restarts, String(process.restarts));
  setText(last, process.last);
  setAttribute(last, "title", process.last);
  showAge(age, process.since);
  setHidden(row.children[8].firstChild, !process.logs?.length);
}
