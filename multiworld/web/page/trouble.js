// What is wrong now, and how urgent a world is. Pure: takes the model and the time, returns facts.

import { list, ranks } from "./words.js";

/** Seconds after which a pending operation, or a world that is being joined, counts as trouble. */
export const WAITS_LONG = 5;
export const JOINS_LONG = 10;

export const REBUILDS_LONG = 30;

const WAITS = 2; // weight of an operation that waits
const REBUILDS = 3; // and of a world that is being rebuilt, as it should be

/** Members whose loss broke the world: said by the others, or their process is gone. */
export function lostMembers(world) {
  const broken = world.state === "broken";
  return world.members.filter(
    (m) => m.state === "lost" || (broken && (m.cause !== "" || m.state === "gone")),
  );
}

export const lostRanks = (world) =>
  lostMembers(world)
    .map((m) => m.rank)
    .filter((rank) => rank >= 0);
const busyRanks = (world) => world.members.filter((m) => m.state === "busy").map((m) => m.rank);

/** The pending operation of a world that waits longest and not idly, or null. */
export function stuckOperation(world, now) {
  const stuck = (world.pending ?? []).filter((p) => !p.idle && now - p.since >= WAITS_LONG);
  return stuck.reduce((oldest, p) => (oldest && oldest.since <= p.since ? oldest : p), null);
}

export function operationName(pending) {
  if (pending.number !== null && pending.number !== undefined) return `${pending.kind} #${pending.number}`;
  if (pending.peer === null || pending.peer === undefined) return pending.kind;
  return `${pending.kind} ${pending.kind.includes("recv") ? "from" : "to"} ${pending.peer}`;
}

export function missingRanks(pending) {
  return Object.keys(pending.missing ?? {})
    .map(Number)
    .sort((a, b) => a - b);
}

/** 0 is the most urgent, 5 a world that is closed, or that a member left in good order. */
export function urgency(world, now) {
  if (world.left) return 5;
  if (world.state === "broken" || world.state === "failed") return 0;
  if (world.state === "closed") return 5;
  if (lostRanks(world).length) return 0;
  if (world.state === "gone" || world.state === "joining") return 1;
  if (stuckOperation(world, now)) return 2;
  if (world.note || busyRanks(world).length || world.candidates) return 3;
  return 4;
}

/** What a world that is not as it should be is, and why; null if it is. */
export function worldTrouble(world) {
  if (world.left) return null;
  const lost = ranks(lostRanks(world));
  if (world.state === "broken") return ["broken", [world.cause, lost].filter(Boolean).join(", ")];
  if (world.state === "failed") return ["failed to join", world.detail || world.note || world.cause];
  if (world.state === "gone") return ["gone", "none of its processes is left"];
  if (lost && world.state !== "closed") return [world.state, `${lost} lost`];
  return null;
}

const sentence = (name, [state, why]) => `${name} ${state}${why ? `: ${why}` : ""}`;

function ofWorld(world, now, ended, fault) {
  const { name } = world;
  const found = [];
  const add = (key, weight, text, since) =>
    found.push({ key: `${key}/${name}`, weight, text, since, world: name });
  const trouble = worldTrouble(world);
  if (trouble && !(ended && world.state === "gone"))
    add(`${world.state}.${world.generation}`, 0, sentence(name, trouble), world.since);
  const stuck = stuckOperation(world, now);
  if (stuck) {
    const missing = ranks(missingRanks(stuck));
    add(
      operationName(stuck),
      WAITS,
      `${operationName(stuck)} in ${name} waits${missing ? ` for ${missing}` : ""}`,
      stuck.since,
    );
  }
  if (world.state === "joining" && fault) {
    add(
      "rebuild",
      now - fault.at < REBUILDS_LONG ? REBUILDS : 1,
      `${name} is being rebuilt: ${faultWords(fault)}`,
      fault.at,
    );
  } else if (world.state === "joining" && !trouble && world.since !== null && now - world.since >= JOINS_LONG)
    add("joining", 2.5, `${name} is joining${world.note ? `: ${world.note}` : ""}`, world.since);
  const busy = ranks(busyRanks(world));
  if (busy) add("busy", 2.7, `${busy} of ${name} busy`, null);
  return found;
}

function ofProcess(process) {
  const who = process.role ? `${process.role} (pid ${process.pid} on ${process.host})` : process.id;
  const why = process.last ? `: ${process.last}` : "";
  return {
    key: `process/${process.id}/${process.state}`,
    weight: 1,
    text: `${who} ${process.state}${why}`,
    since: process.since,
    process: process.id,
  };
}

/** Whether a fault is not healed, and its world not closed since. */
export const isOpen = (fault) => !fault.healed && !fault.over;

/** The faults that are not healed, by world. */
export const openFaults = (model) =>
  new Map(model.faults.filter(isOpen).map((fault) => [fault.world, fault]));

/** "crashed, rank 2" */
export const faultWords = (fault) => [fault.cause, ranks(fault.ranks)].filter(Boolean).join(", ");

/** Whether it is only that worlds are being rebuilt. */
export const onlyRebuilding = (found) => found.length > 0 && found.every(({ weight }) => weight === REBUILDS);

/** What happened last comes first; of operations that wait, the one that waits longest. */
const order = ({ weight }) => (weight === WAITS ? -1 : 1);

/** All that is wrong, the most urgent first. `key` stays the same as long as it is the same trouble. */
export function troubles(model, now) {
  const found = [];
  const note = model.note.replace(/since \d+ s/g, ""); // the seconds count on: it is the same trouble
  if (note) found.push({ key: `note/${note}`, weight: -1, text: model.note, since: null });
  const run = model.run;
  if (run?.ended && run.ended.exitcode !== 0)
    found.push({
      key: "ended",
      weight: -1,
      text: `the run ended with exit code ${run.ended.exitcode}: ${run.ended.reason}`,
      since: null,
    });
  const lost = (run?.peers ?? []).filter((peer) => peer.state === "lost");
  if (lost.length)
    found.push({
      key: `nodes/${list(lost.map((p) => p.node))}`,
      weight: 0,
      text: `${lost.length === 1 ? "node" : "nodes"} ${list(lost.map((p) => p.node))} lost`,
      since: lost[0].since,
    });
  const faults = openFaults(model);
  for (const world of model.worlds.values())
    found.push(...ofWorld(world, now, Boolean(run?.ended), faults.get(world.name)));
  for (const process of model.processes.values())
    if (process.state === "failed" || process.state === "lost") found.push(ofProcess(process));
  return found.sort((a, b) => a.weight - b.weight || order(a) * ((b.since ?? 0) - (a.since ?? 0)));
}
