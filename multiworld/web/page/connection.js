// The stream of views and patches: connects, notices that it is dead, and connects again.

const RETRY = [500, 1000, 2000, 4000]; // ms before each further try
const QUIET = 20_000; // ms without an event, after which the stream is dead: one comes each 15 s at least
const ANSWER = 5_000; // ms that the server has to say whether it refuses
const HIDDEN = 30_000; // ms that the page may be hidden before the stream is closed

const url = (path) => new URL(path, document.baseURI);

export class Connection {
  #source = null;
  #tries = 0;
  #denied = false; // by the server, at the last try
  #retry = null;
  #quiet = null;
  #hide = null;

  /** `on` has `view(data)`, `patch(data)` and `state(name, why)`: live, connecting, reconnecting, refused, paused. */
  constructor(on) {
    this.on = on;
  }

  start() {
    document.addEventListener("visibilitychange", () => this.#visibility());
    this.#open();
  }

  #open() {
    this.#close();
    const source = new EventSource(url("api/v1/events"));
    this.#source = source;
    source.addEventListener("view", (event) => this.#got(source, "view", event));
    source.addEventListener("patch", (event) => this.#got(source, "patch", event));
    source.addEventListener("error", () => this.#failed(source));
    this.#watch();
  }

  #close() {
    clearTimeout(this.#retry);
    clearTimeout(this.#quiet);
    this.#source?.close();
    this.#source = null;
  }

  #got(source, kind, event) {
    if (source !== this.#source) return;
    this.#tries = 0;
    this.#denied = false;
    this.#watch();
    this.on[kind](JSON.parse(event.data));
    this.on.state("live");
  }

  /** The browser would try again only after some errors, and every 3 s: this tries after all of them, and sooner. */
  async #failed(source) {
    if (source !== this.#source) return;
    const answered = source.readyState === EventSource.CLOSED; // with something else than a stream
    this.#close();
    if (!this.#denied) this.on.state("reconnecting");
    const wait = RETRY[Math.min(this.#tries, RETRY.length - 1)];
    this.#tries += 1;
    this.#retry = setTimeout(() => this.#open(), wait);
    const denied = answered && (await this.#refused());
    // Not at each try anew: a screen reader reads each change.
    if (this.#tries > 0 && denied !== this.#denied) this.on.state(denied ? "refused" : "reconnecting");
    this.#denied = this.#tries > 0 && denied;
  }

  async #refused() {
    try {
      const answer = await fetch(url("api/v1/view"), { signal: AbortSignal.timeout(ANSWER) });
      await answer.body?.cancel();
      return answer.status === 401 || answer.status === 403;
    } catch {
      return false;
    }
  }

  /** A dead network does not end a stream. */
  #watch() {
    clearTimeout(this.#quiet);
    this.#quiet = setTimeout(() => this.#failed(this.#source), QUIET);
  }

  #visibility() {
    clearTimeout(this.#hide);
    if (document.hidden) {
      this.#hide = setTimeout(() => {
        this.#close();
        this.on.state("paused");
      }, HIDDEN);
    } else if (this.#source === null) {
      this.#tries = 0;
      this.#denied = false;
      this.on.state("reconnecting");
      this.#open();
    }
  }
}
