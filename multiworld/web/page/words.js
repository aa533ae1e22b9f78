// Numbers, times and ranks in words.

/** Seconds as an age: "12 s", "3 min", "2 h 5 min", "4 d". */
export function span(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return s < 600 && s % 60 ? `${minutes} min ${s % 60} s` : `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  const days = Math.floor(hours / 24);
  return hours % 24 && days < 10 ? `${days} d ${hours % 24} h` : `${days} d`;
}

/** Milliseconds: "0.8 ms", "812 ms", "3.2 s". */
export function milliseconds(ms) {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(1)} s`;
  return span(ms / 1000);
}

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

/** Bytes in decimal units: "999 B", "1.2 GB". */
export function bytes(count) {
  let value = count;
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const digits = unit === 0 || value >= 99.5 ? 0 : 1;
  return `${value.toFixed(digits)} ${UNITS[unit]}`;
}

export const rate = (bytesPerSecond) => `${bytes(bytesPerSecond)}/s`;

const grouped = new Intl.NumberFormat("en");
export const number = (count) => grouped.format(count);

/** "1 world", "3 worlds". */
export const several = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

/** "a, b and c"; of many the first ones and how many more. */
export function list(items, most = 6) {
  const shown = items.slice(0, most).map(String);
  const more = items.length - shown.length;
  if (more > 0) return `${shown.join(", ")} and ${more} more`;
  if (shown.length < 2) return shown.join("");
  return `${shown.slice(0, -1).join(", ")} and ${shown.at(-1)}`;
}

/** "rank 2", "ranks 0, 1 and 3"; "" without any. */
export function ranks(numbers) {
  if (!numbers.length) return "";
  return `${numbers.length === 1 ? "rank" : "ranks"} ${list(numbers)}`;
}

export function percent(part, whole) {
  return whole > 0 ? Math.min(100, Math.floor((100 * part) / whole)) : 0;
}

const two = (n) => String(n).padStart(2, "0");

/** A moment as the time of day in this browser's zone. */
export function clockTime(at) {
  const date = new Date(at * 1000);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** A moment with its date, for titles. */
export const fullTime = (at) => new Date(at * 1000).toISOString();

const collator = new Intl.Collator("en", { numeric: true });
/** Order of names: "w2" before "w10". */
export const byName = (a, b) => collator.compare(a, b);
