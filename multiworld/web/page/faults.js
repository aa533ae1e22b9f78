// The timeline of faults: each with its steps, from seen to active again.

import { eachSecond, now, showAge } from "./clock.js";
import { byId, h, keyed, setAttribute, setHidden, setText } from "./dom.js";
import { faultWords, isOpen } from "./trouble.js";
import { clockTime, fullTime, milliseconds, several } from "./words.js";

/** What is not healed goes on. */
export function startFaults(model) {
  eachSecond(() => {
    for (const item of byId("fault-list").children) {
      const fault = model.faults.find((one) => one.id === item.fault && isOpen(one));
      if (fault) drawTrack(item.parts.track, fault);
    }
  });
}

export function drawFaults(model) {
  const { faults } = model;
  const open = faults.filter(isOpen).length;
  setText(byId("faults-shown"), faults.length ? `${faults.length}${open ? `, ${open} not healed` : ""}` : "");
  setHidden(byId("faults-empty"), faults.length > 0 || !model.loaded);
  setHidden(byId("fault-list"), !faults.length);
  keyed(
    byId("fault-list"),
    faults,
    (fault) => fault.id,
    (fault) => makeFault(fault, fault === faults[0] || isOpen(fault)),
    drawFault,
  );
}

function makeFault(fault, open) {
  const parts = {
    world: h("a", {
      class: "fault-world",
      href: `#world=${encodeURIComponent(fault.world)}`,
      text: fault.world,
    }),
    what: h("span", { class: "fault-what" }),
    when: h("time", { class: "fault-when" }),
    outcome: h("span", { class: "fault-outcome" }, h("span"), h("span")),
    track: h("div", { class: "track", role: "img" }),
    detail: h("p", { class: "fault-detail" }),
    count: h("span"),
    steps: h("ol", { class: "steps" }),
  };
  const line = h("div", { class: "fault-line" }, parts.world, parts.what, parts.when, parts.outcome);
  const item = h(
    "li",
    { class: "fault" },
    line,
    parts.track,
    parts.detail,
    h("details", { open }, h("summary", {}, parts.count), parts.steps),
  );
  item.parts = parts;
  item.fault = fault.id;
  return item;
}

function drawFault(item, fault) {
  const { parts } = item;
  setAttribute(item, "data-healed", String(!isOpen(fault)));
  setText(parts.what, `gen ${fault.generation}, ${faultWords(fault)}`);
  setText(parts.when, clockTime(fault.at));
  setAttribute(parts.when, "datetime", fullTime(fault.at));
  setAttribute(parts.when, "title", fullTime(fault.at));
  const [word, age] = parts.outcome.children;
  setText(word, outcome(fault));
  showAge(age, isOpen(fault) ? fault.at : null, "since ");
  setText(parts.detail, fault.detail ?? "");
  setHidden(parts.detail, !fault.detail);
  drawTrack(parts.track, fault);
  setText(parts.count, several(fault.steps.length, "step"));
  const steps = fault.steps.map((step, at) => ({ ...step, at: `${at}` }));
  keyed(parts.steps, steps, (step) => step.at, makeStep, drawStep);
}

function outcome(fault) {
  if (fault.healed) return `healed in ${milliseconds(fault.ms ?? lastStep(fault))}`;
  return fault.over ? "closed, not healed" : "not healed";
}

const lastStep = (fault) => fault.steps.at(-1)?.ms ?? 0;

/** One piece for each time between two steps, as wide as it was long; what it led to gives its colour. */
function drawTrack(track, fault) {
  const total = Math.max(fault.ms ?? 0, lastStep(fault)) || 1;
  const whole = !isOpen(fault) ? total : Math.max(1.05 * total, 1000 * (now() - fault.at));
  const pieces = fault.steps
    .slice(1)
    .map((step, at) => ({ key: `${at}`, what: step.what, from: fault.steps[at].ms, to: step.ms }));
  if (isOpen(fault)) pieces.push({ key: "open", what: "open", from: lastStep(fault), to: whole });
  keyed(
    track,
    pieces,
    (piece) => piece.key,
    () => h("span"),
    (element, piece) => {
      setAttribute(element, "class", `piece ${piece.what}`);
      element.style.left = `${(100 * piece.from) / whole}%`;
      element.style.width = `${(100 * (piece.to - piece.from)) / whole}%`;
    },
  );
  const words = fault.steps.map((step) => `${step.what} at ${milliseconds(step.ms)}`);
  setAttribute(track, "aria-label", `${words.join(", ")}, ${outcome(fault)}`);
}

function makeStep() {
  return h(
    "li",
    {},
    h("span", { class: "step-mark", "aria-hidden": "true" }),
    h("span", { class: "step-ms" }),
    h("span", { class: "step-what" }),
    h("span", { class: "step-text" }),
  );
}

function drawStep(item, step) {
  const [mark, ms, what, text] = item.children;
  setAttribute(mark, "class", `step-mark ${step.what}`);
  setText(ms, milliseconds(step.ms));
  setText(what, step.what);
  setText(text, step.text);
}
