// The server's clock, and ages that count on by themselves while they can be seen.

import { setText } from "./dom.js";
import { span } from "./words.js";

let offset = 0; // seconds from this browser's clock to the server's

/** Takes the server's time. Delays make it late, never early: within a connection the greatest offset is the best. */
export function synchronise(serverNow, { fresh = false } = {}) {
  const measured = serverNow - Date.now() / 1000;
  if (fresh || measured > offset || Math.abs(measured - offset) > 5) offset = measured;
}

export const now = () => Date.now() / 1000 + offset;

const ages = new WeakMap(); // element → {since, prefix}
const visible = new Set();

function paint(element) {
  const { since, prefix } = ages.get(element);
  setText(element, since === null ? "" : prefix + span(now() - since));
}

const observer = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) {
      visible.add(target);
      paint(target);
    } else visible.delete(target);
  }
});

/** Lets an element show how long ago `since` is (null: nothing). */
export function showAge(element, since, prefix = "") {
  const had = ages.get(element);
  if (had && had.since === since && had.prefix === prefix) return;
  ages.set(element, { since, prefix });
  if (!had) observer.observe(element);
  paint(element);
}

const listeners = [];
/** Calls `fn` once a second while the page is visible. */
export const eachSecond = (fn) => listeners.push(fn);

let timer = null;

function tick() {
  for (const element of visible) paint(element);
  for (const fn of listeners) fn();
}

function run() {
  if (document.hidden) {
    clearInterval(timer);
    timer = null;
  } else if (timer === null) {
    timer = setInterval(tick, 1000);
    tick();
  }
}

export function startClock() {
  document.addEventListener("visibilitychange", run);
  run();
}
