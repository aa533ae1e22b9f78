// What a cell means, beside the pointer or the focus.

import { showAge } from "./clock.js";
import { byId, h } from "./dom.js";
import { cellWords } from "./cells.js";
import { bytes } from "./words.js";

export class Tooltip {
  #cell = null;

  constructor(model) {
    this.model = model;
    this.box = byId("tooltip");
    const grid = byId("matrix");
    grid.addEventListener("pointerover", (event) => this.#over(event.target));
    grid.addEventListener("pointerleave", () => this.hide());
    grid.addEventListener(
      "focusin",
      (event) => event.target.matches(":focus-visible") && this.#over(event.target),
    );
    grid.addEventListener("focusout", () => this.hide());
    addEventListener("scroll", () => this.hide(), { capture: true, passive: true });
  }

  get shown() {
    return this.#cell !== null;
  }

  hide() {
    this.#cell?.removeAttribute("aria-describedby");
    this.#cell = null;
    this.box.hidden = true;
  }

  #over(target) {
    const cell = target.closest(".cell");
    const world = cell && this.model.worlds.get(cell.closest(".row")?.world);
    const member = world?.members[cell.member];
    if (!member) return this.hide();
    if (cell === this.#cell) return;
    this.hide();
    this.#cell = cell;
    this.box.replaceChildren(...this.#lines(world, member));
    this.box.hidden = false;
    cell.setAttribute("aria-describedby", "tooltip");
    this.#place(cell.getBoundingClientRect());
  }

  #lines(world, member) {
    const lines = [h("strong", { text: `${world.name}, ${cellWords(member)}` })];
    const add = (name, value) =>
      value !== "" &&
      lines.push(
        h("span", {}, h("span", { class: "fact-name", text: name }), h("span", { text: String(value) })),
      );
    add("evidence", member.evidence ?? "");
    const process = this.model.processes.get(member.process);
    if (process) add("process", `pid ${process.pid} on ${process.host}, ${process.state}`);
    else add("process", member.process);
    if (member.worker !== null && member.worker !== undefined)
      add("worker", `rank ${member.worker} of the run${process?.role ? `, ${process.role}` : ""}`);
    add("seat", member.seat ?? "");
    add("generation", member.generation);
    if (member.total > 0) add("state", `${bytes(member.received)} of ${bytes(member.total)}`);
    if (member.since !== null) {
      const age = h("span");
      showAge(age, member.since);
      lines.push(h("span", {}, h("span", { class: "fact-name", text: "for" }), age));
    }
    return lines;
  }

  #place(cell) {
    const box = this.box.getBoundingClientRect();
    const left = Math.max(8, Math.min(cell.left, innerWidth - box.width - 8));
    const below = cell.bottom + 6;
    const top = below + box.height > innerHeight ? cell.top - box.height - 6 : below;
    this.box.style.left = `${left}px`;
    this.box.style.top = `${Math.max(4, top)}px`;
  }
}
