// The operations of a world that wait: which, since when, who waits, who is missing.

import { showAge, now } from "./clock.js";
import { h, keyed, setAttribute, setHidden, setText } from "./dom.js";
import { missingRanks, operationName, WAITS_LONG } from "./trouble.js";
import { bytes, clockTime } from "./words.js";

const ANSWER = 10_000; // ms that the members have to answer

export class PendingList {
  constructor(world) {
    this.world = world;
    this.list = h("ol", { class: "pending" });
    this.empty = h("p", { class: "empty", text: "No operation waits." });
    this.asOf = h("span", { class: "muted" });
    this.asked = h("span", { class: "muted", role: "status" });
    const button = h("button", {
      type: "button",
      class: "small",
      text: "Ask the members now",
      onclick: () => this.#ask(),
    });
    const head = h(
      "div",
      { class: "section-head" },
      h("h3", { text: "Pending operations" }),
      button,
      this.asOf,
      this.asked,
    );
    this.element = h(
      "section",
      { class: "panel-section", "aria-label": "Pending operations" },
      head,
      this.list,
      this.empty,
    );
  }

  close() {
    this.closed = true;
  }

  /** `told`: when the server said so. The ages within the sentences are of that moment. */
  draw(pending, told) {
    setText(this.asOf, pending.length ? `as of ${clockTime(told)}` : "");
    keyed(this.list, numbered(pending), (p) => p.key, makePending, drawPending);
    setHidden(this.empty, pending.length > 0);
  }

  async #ask() {
    setText(this.asked, "asking");
    let words;
    try {
      const path = `api/v1/worlds/${encodeURIComponent(this.world)}/pending`;
      const answer = await fetch(new URL(path, document.baseURI), {
        signal: AbortSignal.timeout(ANSWER),
        cache: "no-store",
      });
      if (!answer.ok) throw new Error((await answer.text()).slice(0, 200) || `status ${answer.status}`);
      const { pending } = await answer.json();
      if (this.closed) return;
      this.draw(pending, now());
      words = "answered";
    } catch (error) {
      words = `no answer: ${error.message}`;
    }
    if (!this.closed) setText(this.asked, words);
  }
}

/** Operations with keys that stay: name, tag and which one of that name; `since` differs by the member that answers. */
function numbered(pending) {
  const seen = new Map();
  return pending.map((p) => {
    const name = `${operationName(p)}/${p.tag}`;
    seen.set(name, (seen.get(name) ?? 0) + 1);
    return { ...p, key: `${name}/${seen.get(name)}` };
  });
}

function makePending() {
  const parts = {
    name: h("span", { class: "pending-name" }),
    more: h("span", { class: "muted" }),
    age: h("span", { class: "pending-age" }),
    text: h("p", { class: "pending-text" }),
    waiting: h("span", { class: "chips" }),
    absent: h("span", { class: "chips absent" }),
    missing: h("dl", { class: "missing" }),
  };
  const item = h(
    "li",
    {},
    h("div", { class: "pending-line" }, parts.name, parts.more, parts.age),
    parts.text,
    h(
      "div",
      { class: "pending-waiting" },
      h("span", { class: "fact-name", text: "waiting" }),
      parts.waiting,
      h("span", { class: "fact-name", text: "missing" }),
      parts.absent,
    ),
    parts.missing,
  );
  item.parts = parts;
  return item;
}

function drawPending(item, p) {
  const { parts } = item;
  setText(parts.name, operationName(p));
  setText(
    parts.more,
    [
      p.size ? bytes(p.size) : "",
      p.tag === null || p.tag === undefined ? "" : `tag ${p.tag}`,
      p.idle ? "idle" : "",
    ]
      .filter(Boolean)
      .join(", "),
  );
  setAttribute(item, "data-level", p.idle ? "idle" : now() - p.since >= WAITS_LONG ? "long" : "short");
  showAge(parts.age, p.since, "since ");
  setText(parts.text, p.text);
  chips(parts.waiting, p.waiting);
  chips(parts.absent, missingRanks(p));
  const missing = missingRanks(p)
    .map((rank) => ({ rank, why: p.missing[rank] }))
    .filter((m) => !p.text.includes(m.why));
  keyed(
    parts.missing,
    missing,
    (m) => m.rank,
    ({ rank }) => h("div", {}, h("dt", { text: `rank ${rank}` }), h("dd")),
    (element, m) => setText(element.lastChild, m.why),
  );
}

function chips(parent, numbers) {
  keyed(
    parent,
    numbers,
    (n) => n,
    (n) => h("span", { class: "chip", text: String(n) }),
    () => {},
  );
}
