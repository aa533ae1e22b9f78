// The head: title, run, connection, what is wrong, counts.

import { eachSecond, now, showAge } from "./clock.js";
import { byId, h, keyed, setAttribute, setHidden, setText } from "./dom.js";
import { onlyRebuilding, troubles } from "./trouble.js";
import { several } from "./words.js";

const SHOWN = 4; // troubles in the head; the others are counted

const WORLD_STATES = ["broken", "failed", "gone", "joining", "active", "closed"];
const PROCESS_STATES = ["lost", "failed", "restarting", "starting", "retiring", "up", "stopped", "ended"];

const CONNECTION = {
  live: "live",
  connecting: "connecting",
  reconnecting: "reconnecting",
  refused: "refused: open the page with its token again",
  paused: "paused while the page is hidden",
};

function countStates(items, order) {
  const counts = new Map(order.map((state) => [state, 0]));
  for (const { state } of items) counts.set(state, (counts.get(state) ?? 0) + 1);
  return [...counts].filter(([, count]) => count > 0);
}

export class Head {
  #announced = new Set();

  /** `filterBy(state)` shows only the worlds of a state. */
  constructor(model, filterBy) {
    this.model = model;
    this.filterBy = filterBy;
    this.connection = { name: "connecting", since: null };
    eachSecond(() => this.#wrong());
  }

  /** The connection came to a state; `since` counts from the first failure on. */
  connected(name) {
    const since = name === "live" ? null : (this.connection.since ?? now());
    this.connection = { name, since };
    const element = byId("connection");
    setAttribute(element, "data-state", name);
    setText(byId("connection-text"), CONNECTION[name]);
    this.#age();
    document.body.classList.toggle("stale", name !== "live");
  }

  #age() {
    const element = byId("connection");
    this.age ??= element.appendChild(h("span", { class: "connection-age", "aria-hidden": "true" }));
    const { name, since } = this.connection;
    showAge(this.age, name === "reconnecting" ? since : null, "since ");
  }

  draw() {
    const { model } = this;
    if (!model.loaded) return;
    setText(byId("title"), model.title || "multiworld");
    this.#facts();
    this.#counts(byId("world-counts"), "Worlds", model.worlds, WORLD_STATES, true);
    this.#counts(byId("process-counts"), "Processes", model.processes, PROCESS_STATES, false);
    this.#wrong();
  }

  #facts() {
    const { run } = this.model;
    const facts = [];
    if (run) {
      facts.push(["entry point", run.entrypoint], ["node", run.node]);
      if (run.seat === null) facts.push(["seat", run.nodes ? "spare" : "waits for the other nodes"]);
      else if (run.nodes > 1) facts.push(["seat", `${run.seat} of ${run.nodes}`]);
      facts.push([
        "restart",
        run.max_restarts ? `${run.restart}, at most ${run.max_restarts}` : `${run.restart}`,
      ]);
      if (run.secure) facts.push(["connections", "TLS"]);
      for (const peer of run.peers ?? []) facts.push([`node ${peer.node}`, peer.state]);
      if (run.ended) facts.push(["ended", `exit code ${run.ended.exitcode}, ${run.ended.reason}`]);
    }
    facts.push(...totalFacts(this.model.totals));
    const parts = facts.map(([name, value]) => ({ key: name, name, value: String(value), since: null }));
    if (run && !run.ended) parts.push({ key: "up", name: "up", since: run.started });
    keyed(
      byId("facts"),
      parts,
      (part) => part.key,
      (part) =>
        h(
          "span",
          { class: "fact" },
          h("span", { class: "fact-name", text: part.name }),
          h("span", { class: "fact-value" }),
        ),
      (element, part) => {
        if (part.since === null) setText(element.lastChild, part.value);
        else showAge(element.lastChild, part.since);
      },
    );
  }

  #counts(parent, word, map, order, pressable) {
    const parts = countStates([...map.values()], order);
    keyed(
      parent,
      [["", map.size], ...parts],
      ([state]) => state,
      ([state]) => {
        if (!state) return h("span", { class: "count-word" });
        if (!pressable) return h("span", { class: "count", "data-state": state });
        return h("button", {
          type: "button",
          class: "count",
          "data-state": state,
          title: `Show only worlds that are ${state}`,
          onclick: () => this.filterBy(state),
        });
      },
      (element, [state, count]) => setText(element, state ? `${count} ${state}` : `${word} ${count}`),
    );
  }

  #wrong() {
    if (!this.model.loaded) return;
    const found = troubles(this.model, now());
    const box = byId("trouble");
    const rebuilding = onlyRebuilding(found);
    setAttribute(box, "data-level", rebuilding ? "rebuilding" : found.length ? "wrong" : "fine");
    setText(byId("trouble-word"), rebuilding ? "Being rebuilt" : found.length ? "Wrong now" : this.#fine());
    const shown = found.slice(0, SHOWN);
    if (found.length > SHOWN)
      shown.push({ key: "more", text: `and ${found.length - SHOWN} more`, since: null, more: true });
    keyed(
      byId("trouble-list"),
      shown,
      (t) => t.key,
      troubleItem,
      (item, t) => {
        setText(item.firstChild.firstChild, t.text);
        showAge(item.lastChild, t.since ?? null, "since ");
      },
    );
    setHidden(byId("trouble-list"), !found.length);
    this.#announce(found);
    const title = this.model.title || "multiworld";
    document.title = found.length ? `${found.length} ${rebuilding ? "rebuilt" : "wrong"}: ${title}` : title;
  }

  #fine() {
    const { worlds } = this.model;
    if (!worlds.size) return "Nothing is wrong: no world yet";
    const joining = [...worlds.values()].filter((world) => world.state === "joining").length;
    return `Nothing is wrong: ${several(worlds.size, "world")}${joining ? `, ${joining} joining` : ""}`;
  }

  /** Tells a screen reader of new trouble, once. */
  #announce(found) {
    const fresh = found.filter((t) => !this.#announced.has(t.key));
    this.#announced = new Set(found.map((t) => t.key));
    if (!found.length) setText(byId("announcer"), ""); // the same trouble is told again when it comes back
    if (!fresh.length) return;
    const more = fresh.length > SHOWN ? `; and ${fresh.length - SHOWN} more` : "";
    setText(
      byId("announcer"),
      fresh
        .slice(0, SHOWN)
        .map((t) => t.text)
        .join("; ") + more,
    );
  }
}

/** What has happened so far, without what has not. */
function totalFacts({ failures, restarts, nodes_lost: nodesLost, broken = {} }) {
  const causes = Object.entries(broken).filter(([, count]) => count);
  const worlds = causes.reduce((sum, [, count]) => sum + count, 0);
  const each = causes.map(([cause, count]) => `${count} ${cause}`).join(", ");
  const all = [
    ["failures", failures],
    ["restarts", restarts],
    ["nodes lost", nodesLost],
    ["breakages", worlds && `${worlds} (${each})`],
  ];
  return all.filter(([, count]) => count);
}

function troubleItem(t) {
  let target = "#worlds";
  if (t.world !== undefined) target = `#world=${encodeURIComponent(t.world)}`;
  else if (t.process !== undefined) target = `#log=${encodeURIComponent(t.process)}`;
  const inner = t.key.startsWith("note/") || t.key === "ended" ? h("span") : h("a", { href: target });
  inner.append("");
  return h("li", {}, h("span", { class: "trouble-text" }, inner), h("span", { class: "trouble-age" }));
}
