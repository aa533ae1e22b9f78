// The stream of views and patches: connects, notices that it is dead, and connects again.

const RETRY = [500, 1000, 2000, 4000]; // ms before each further try
const QUIET = 20_000; // ms without an event, after which the server is asked whether it lives
const ANSWER = 5_000; // ms that it has to answer
const HIDDEN = 30_000; // ms that the page may be hidden before the stream is closed

const url = (path) => new URL(path, document.baseURI);

export class Connection {
  #source = null;
  #tries = 0;
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
    this.#watch();
    this.on[kind](JSON.parse(event.data));
    this.on.state("live");
  }

  /** The browser would try again only after some errors, and every 3 s: this tries after all of them, and sooner. */
  async #failed(source) {
    if (source !== this.#source) return;
    const answered = source.readyState === EventSource.CLOSED; // with something else than a stream
    this.#close();
    this.on.state("reconnecting");
    const wait = RETRY[Math.min(this.#tries, RETRY.length - 1)];
    this.#tries += 1;
    this.#retry = setTimeout(() => this.#open(), wait);
    if (answered && (await this.#refused())) this.on.state("refused");
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

  /** A dead network does not end a stream, and keep-alives are not told to a page: ask when it was quiet for long. */
  #watch() {
    clearTimeout(this.#quiet);
    this.#quiet = setTimeout(() => this.#ask(this.#source), QUIET);
  }

  async #ask(source) {
    let alive = false;
    try {
      await fetch(url("live"), { signal: AbortSignal.timeout(ANSWER), cache: "no-store" });
      alive = true; // whatever it says of the run
    } catch {
      // no answer: not alive
    }
    if (source !== this.#source || source === null) return;
    if (alive) this.#watch();
    else this.#failed(source);
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
      this.on.state("reconnecting");
      this.#open();
    }
  }
}
