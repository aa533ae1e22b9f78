// A member as a cell of the matrix: letter, shape and colour for its state, and the same in words.

import { setAttribute } from "./dom.js";
import { percent } from "./words.js";

/** Letter before the rank, by state. The shapes are in worlds.css. */
export const LETTERS = {
  active: "",
  joining: "J",
  busy: "~",
  broken: "B",
  closed: "C",
  failed: "F",
  gone: "G",
  lost: "L",
};

export const MEANINGS = {
  active: "active",
  joining: "joining (filled: its part of the state)",
  busy: "busy",
  broken: "saw the breakage",
  lost: "lost",
  gone: "process gone",
  failed: "failed to join",
  closed: "closed",
};

const rankText = (member) => (member.rank < 0 ? "?" : String(member.rank));
const known = (state) => (state in LETTERS ? state : "gone");

export const cellText = (member) => `${LETTERS[known(member.state)]}${rankText(member)}`;

/** "rank 2: lost, crashed"; "rank 4: joining, has 40 % of the state". */
export function cellWords(member) {
  const words = [`${member.rank < 0 ? "rank not known yet" : `rank ${member.rank}`}: ${member.state}`];
  if (member.cause) words.push(member.cause);
  if (member.total > 0) words.push(`has ${percent(member.received, member.total)} % of the state`);
  return words.join(", ");
}

const drawn = new WeakMap(); // cell → what it shows

/** Draws a member into a cell, if it shows anything else. */
export function drawCell(cell, member) {
  const done = member.total > 0 ? percent(member.received, member.total) : -1;
  const key = `${member.rank}|${member.state}|${member.cause}|${done}`;
  if (drawn.get(cell) === key) return;
  drawn.set(cell, key);
  cell.textContent = cellText(member);
  setAttribute(cell, "data-state", known(member.state));
  setAttribute(cell, "aria-label", cellWords(member));
  cell.classList.toggle("filling", done >= 0);
  if (done >= 0) cell.style.setProperty("--done", `${done}%`);
}
