// Details of a world: its state, breakage, pending operations, members, waits and links.

import { showAge } from "./clock.js";
import { h, keyed, setAttribute, setHidden, setText } from "./dom.js";
import { sizeOf } from "./matrix.js";
import { drawLinks, drawWaited } from "./traffic.js";
import { PendingList } from "./pendinglist.js";
import { lostMembers, lostRanks } from "./trouble.js";
import { bytes, percent, ranks } from "./words.js";

export class WorldPanel {
  /** `openLog(process)` shows a process's log; `focusBack(name)` puts the focus on the world's row. */
  constructor(model, { openLog, focusBack }) {
    this.model = model;
    this.openLog = openLog;
    this.focusBack = focusBack;
  }

  title(name) {
    return `World ${name}`;
  }

  open(body, name) {
    this.name = name;
    this.missing = h("p", { class: "empty", text: "There is no world of this name." });
    this.facts = h("p", { class: "facts" });
    this.breakage = h("div", { class: "breakage" });
    this.pending = new PendingList(name);
    this.members = section(
      "Members",
      h(
        "table",
        { class: "facts-table" },
        headRow(["Rank", "State", "For", "Process", "Worker", ""]),
        h("tbody"),
      ),
    );
    this.waited = section("Waited for", h("ol", { class: "bars" }));
    this.links = section(
      "Throughput",
      h("table", { class: "facts-table" }, headRow(["Link", "Messages", "Bytes", "Rate"]), h("tbody")),
      h("p", { class: "muted" }),
    );
    this.sections = [this.facts, this.breakage, this.pending.element, this.members, this.waited, this.links];
    this.members.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) this.openLog(button.process);
    });
    body.append(this.missing, ...this.sections);
    this.draw();
  }

  close() {
    this.pending.close();
  }

  /** Marks a member's row (its place among the members). */
  point(at) {
    for (const [i, row] of [...this.members.querySelectorAll("tbody tr")].entries()) {
      row.classList.toggle("pointed", i === at);
      if (i === at) row.scrollIntoView({ block: "nearest" });
    }
  }

  draw() {
    const world = this.model.worlds.get(this.name);
    setText(this.missing, this.model.loaded ? "There is no world of this name." : "No data yet.");
    setHidden(this.missing, Boolean(world));
    for (const element of this.sections)
      if (element !== this.waited && element !== this.links) setHidden(element, !world);
    setHidden(this.waited, !world || !Object.keys(world.waited ?? {}).length);
    setHidden(this.links, !world?.links?.length);
    if (!world) return;
    this.#drawFacts(world);
    this.#drawBreakage(world);
    this.pending.draw(world.pending ?? [], world.told);
    keyed(
      this.members.querySelector("tbody"),
      world.members.map((m, at) => ({ ...m, at })),
      (m) => m.at,
      makeMember,
      (row, m) => drawMember(row, m, this.model.processes.get(m.process)),
    );
    drawWaited(this.waited.querySelector("ol"), world.waited ?? {});
    drawLinks(this.links, world.links ?? []);
  }

  #drawFacts(world) {
    const parts = [
      ["state", world.state, world.state],
      ["generation", String(world.generation)],
      ["members", sizeOf(world)],
      world.backend && ["backend", world.backend],
      world.candidates && ["waiting to be let in", String(world.candidates)],
      world.note && ["note", world.note],
    ].filter(Boolean);
    keyed(
      this.facts,
      [...parts, ["for", null]],
      ([name]) => name,
      ([name, , state]) =>
        h(
          "span",
          { class: "fact" },
          h("span", { class: "fact-name", text: name }),
          h("span", { class: state ? "badge" : "fact-value" }),
        ),
      (element, [name, value]) => {
        if (value === null) return showAge(element.lastChild, world.since);
        setText(element.lastChild, value);
        if (name === "state") setAttribute(element.lastChild, "data-state", value);
      },
    );
  }

  #drawBreakage(world) {
    const lost = lostRanks(world);
    const broken = world.cause || world.detail || lost.length;
    setHidden(this.breakage, !broken);
    if (!broken) return;
    const evidence = lostMembers(world)
      .filter((m) => m.evidence)
      .map((m) => `rank ${m.rank}: ${m.evidence}`);
    const more = [...new Set([world.detail, ...evidence])].map((text, at) => [`line ${at}`, text]);
    const lines = [["what", [world.cause, ranks(lost)].filter(Boolean).join(", ")], ...more];
    keyed(
      this.breakage,
      lines.filter(([, text]) => text),
      ([key]) => key,
      ([key]) => h("p", { class: key === "what" ? "breakage-what" : "" }),
      (p, [, text]) => setText(p, text),
    );
  }
}

export function section(title, ...children) {
  return h("section", { class: "panel-section", "aria-label": title }, h("h3", { text: title }), ...children);
}

function headRow(names) {
  return h("thead", {}, h("tr", {}, ...names.map((name) => h("th", { scope: "col", text: name }))));
}

function makeMember() {
  const cells = ["Rank", "State", "For", "Process", "Worker", ""].map((name) =>
    h("td", { "data-label": name }),
  );
  cells[1].append(h("span", { class: "badge" }), h("span", { class: "member-why" }));
  cells[5].append(h("button", { type: "button", class: "small", text: "Log" }));
  return h("tr", {}, ...cells);
}

function drawMember(row, member, process) {
  const [rank, state, age, where, worker, log] = row.children;
  setText(rank, member.rank < 0 ? "?" : String(member.rank));
  const [badge, why] = state.children;
  setText(badge, member.state);
  setAttribute(badge, "data-state", member.state);
  const transfer =
    member.total > 0 ? `${percent(member.received, member.total)} % of ${bytes(member.total)}` : "";
  setText(why, [member.cause, transfer].filter(Boolean).join(", "));
  setAttribute(why, "title", member.evidence || null);
  showAge(age, member.since);
  const place = process ? `${process.pid} on ${process.host}` : member.process || "–";
  setText(where, member.seat ? `${place}, seat ${member.seat}` : place);
  setText(worker, member.worker === null || member.worker === undefined ? "–" : String(member.worker));
  setHidden(log.firstChild, !process?.logs?.length);
  log.firstChild.process = member.process;
  setAttribute(log.firstChild, "aria-label", `Log of the process of rank ${member.rank}`);
}
