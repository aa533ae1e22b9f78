// The last events, the newest at the end; follows them unless the reader has scrolled up.

import { byId, h, keyed, setHidden } from "./dom.js";
import { clockTime, fullTime } from "./words.js";

const NEAR = 24; // px from the end that still count as being there

let following = true;

const atEnd = (box) => box.scrollHeight - box.scrollTop - box.clientHeight < NEAR;

export function startEvents() {
  const box = byId("event-list");
  box.addEventListener(
    "scroll",
    () => {
      following = atEnd(box);
      if (following) setHidden(byId("events-end"), true);
    },
    { passive: true },
  );
  byId("events-end").addEventListener("click", () => {
    following = true;
    setHidden(byId("events-end"), true);
    box.scrollTop = box.scrollHeight;
  });
}

export function drawEvents(model) {
  const box = byId("event-list");
  const before = box.scrollTop;
  keyed(
    box,
    model.events,
    (event) => `${event.id} ${event.at}`, // a server that was started anew counts from 1 again
    makeEvent,
    () => {},
  );
  if (following) box.scrollTop = box.scrollHeight;
  else {
    box.scrollTop = before;
    setHidden(byId("events-end"), false);
  }
}

function makeEvent(event) {
  const warning = event.level === "warning";
  return h(
    "li",
    { "data-level": event.level },
    h("time", { datetime: fullTime(event.at), title: fullTime(event.at), text: clockTime(event.at) }),
    h("span", {
      class: "event-mark",
      text: warning ? "!" : "",
      "aria-label": warning ? "warning" : null,
      role: warning ? "img" : null,
    }),
    h("span", { class: "event-world", text: event.world }),
    h("span", { class: "event-text", text: event.text }),
  );
}
