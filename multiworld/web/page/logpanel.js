// The end of a process's log.

import { h, setAttribute, setText } from "./dom.js";
import { bytes, clockTime } from "./words.js";

const TAIL = 65536; // bytes
const ANSWER = 10_000; // ms

// Colours and cursor movements of terminals: ESC [ ... letter, ESC ] ... BEL, and what else begins with ESC.
const ESCAPES = /\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])/g;

export class LogPanel {
  constructor(model, focusBack) {
    this.model = model;
    this.focusBack = focusBack;
  }

  title(id) {
    const process = this.model.processes.get(id);
    return process?.role ? `Log of ${process.role}` : `Log of ${id}`;
  }

  open(body, id) {
    this.id = id;
    this.asked = 0;
    this.stream = null;
    this.tabs = h("span", { class: "toggle", role: "group", "aria-label": "Stream" });
    this.state = h("span", { class: "muted", role: "status" });
    this.pre = h("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "End of the log" });
    const refresh = h("button", {
      type: "button",
      class: "small",
      text: "Refresh",
      onclick: () => this.#load(),
    });
    body.append(h("div", { class: "section-head" }, this.tabs, refresh, this.state), this.pre);
    this.draw();
  }

  close() {
    this.asked += 1; // an answer that is still to come is not shown
  }

  draw() {
    const process = this.model.processes.get(this.id);
    if (!this.model.loaded || this.stream !== null) return;
    const streams = process?.logs ?? [];
    if (!streams.length)
      return setText(
        this.state,
        process ? "This process writes no log file." : "There is no process of this name.",
      );
    this.tabs.replaceChildren(
      ...streams.map((stream) =>
        h("button", { type: "button", text: stream, onclick: () => this.#choose(stream) }),
      ),
    );
    const wanted = process.state === "failed" ? "stderr" : "stdout";
    this.#choose(streams.includes(wanted) ? wanted : streams[0]);
  }

  #choose(stream) {
    this.stream = stream;
    for (const tab of this.tabs.children)
      setAttribute(tab, "aria-pressed", String(tab.textContent === stream));
    this.#load();
  }

  async #load() {
    if (this.stream === null) return;
    this.asked += 1;
    const { asked } = this;
    setText(this.state, "loading");
    let text = "";
    let state;
    try {
      const path = `api/v1/processes/${encodeURIComponent(this.id)}/log?stream=${encodeURIComponent(this.stream)}&bytes=${TAIL}`;
      const answer = await fetch(new URL(path, document.baseURI), {
        signal: AbortSignal.timeout(ANSWER),
        cache: "no-store",
      });
      text = await answer.text();
      if (!answer.ok) throw new Error(text.slice(0, 200) || `status ${answer.status}`);
      state = text ? `the last ${bytes(text.length)}, read at ${clockTime(Date.now() / 1000)}` : "empty";
    } catch (error) {
      text = "";
      state = `no answer: ${error.message}`;
    }
    if (asked !== this.asked) return;
    setText(this.state, state);
    setText(this.pre, text.replace(ESCAPES, ""));
    this.pre.scrollTop = this.pre.scrollHeight;
  }
}
