// Throughput of the links of a world, and for whom its members have waited.

import { h, keyed, setText } from "./dom.js";
import { bytes, number, rate } from "./words.js";

const SHOWN = 40; // links; the fastest ones

export function drawLinks(element, links) {
  const sorted = [...links].sort(
    (a, b) => b.rate - a.rate || b.bytes - a.bytes || a.from - b.from || a.to - b.to,
  );
  const fastest = Math.max(1, ...links.map((link) => link.rate));
  keyed(
    element.querySelector("tbody"),
    sorted.slice(0, SHOWN),
    (link) => `${link.from} ${link.to}`,
    (link) => {
      const cells = ["Link", "Messages", "Bytes", "Rate"].map((name) => h("td", { "data-label": name }));
      cells[0].textContent = `${link.from} → ${link.to}`;
      cells[3].append(
        h("span", { class: "rate" }),
        h("span", { class: "bar", "aria-hidden": "true" }, h("span")),
      );
      return h("tr", {}, ...cells);
    },
    (row, link) => {
      const [, messages, sent, speed] = row.children;
      setText(messages, number(link.messages));
      setText(sent, bytes(link.bytes));
      setText(speed.firstChild, rate(link.rate));
      speed.lastChild.firstChild.style.width = `${(100 * link.rate) / fastest}%`;
    },
  );
  setText(element.lastChild, links.length > SHOWN ? `and ${links.length - SHOWN} slower links` : "");
}

export function drawWaited(list, waited) {
  const ranks = Object.entries(waited)
    .map(([rank, seconds]) => ({ rank: Number(rank), seconds }))
    .sort((a, b) => a.rank - b.rank);
  const longest = Math.max(0.02, ...ranks.map((r) => r.seconds));
  keyed(
    list,
    ranks,
    (r) => r.rank,
    (r) =>
      h(
        "li",
        {},
        h("span", { class: "bar-name", text: `rank ${r.rank}` }),
        h("span", { class: "bar", "aria-hidden": "true" }, h("span")),
        h("span", { class: "bar-value" }),
      ),
    (item, r) => {
      item.children[1].firstChild.style.width = `${(100 * r.seconds) / longest}%`;
      setText(item.lastChild, `${r.seconds.toFixed(2)} s`);
    },
  );
}
