// Keys of the whole page: "/" filters, "?" lists the keys, Escape closes what is open.

import { byId } from "./dom.js";

const typing = (target) => target instanceof HTMLElement && target.matches("input, textarea, select");

export function startKeys({ filter, matrix, tooltip, panel, matrixKeys }) {
  const dialog = byId("keys");
  byId("keys-button").addEventListener("click", () => dialog.showModal());
  byId("keys-close").addEventListener("click", () => dialog.close());
  addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    if (event.key === "Escape") escape(event);
    else if (typing(event.target)) fromFilter(event);
    else if (event.key === "/") {
      event.preventDefault();
      filter.focus();
      filter.select();
    } else if (event.key === "?") {
      event.preventDefault();
      dialog.showModal();
    }
  });

  function escape(event) {
    if (event.target === filter && filter.value) {
      event.preventDefault();
      filter.value = "";
      matrix.filter("");
    } else if (tooltip.shown && !panel.shown) tooltip.hide();
    else panel.close();
  }

  /** From the filter down into the worlds that it left. */
  function fromFilter(event) {
    if (event.target !== filter || (event.key !== "ArrowDown" && event.key !== "Enter")) return;
    event.preventDefault();
    const [first] = matrix.shown;
    if (first) matrixKeys.focus(first.world);
  }
}
