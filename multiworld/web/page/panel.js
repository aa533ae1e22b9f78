// The panel at the side. What it shows is in the address (#world=w0, #log=alpha/4711), so that a link can be sent.

import { byId, setHidden, setText } from "./dom.js";

const narrow = matchMedia("(max-width: 900px)");

export function parseHash(hash) {
  const match = /^#(world|log)=(.*)$/s.exec(hash);
  if (!match) return null;
  try {
    return { kind: match[1], name: decodeURIComponent(match[2]) };
  } catch {
    return null; // cut off in the middle of an escape
  }
}

export class Panel {
  #shown = null; // {kind, name}
  #opener = null;
  #content = null;

  /** `contents[kind]` has `open(body, name)`, `draw()`, `close()` and `title(name)`; `changed(shown)` hears of each. */
  constructor(contents, changed) {
    this.contents = contents;
    this.changed = changed;
    this.aside = byId("panel");
    byId("panel-close").addEventListener("click", () => this.close());
    addEventListener("hashchange", () => this.follow());
    narrow.addEventListener("change", () => this.#cover());
  }

  get shown() {
    return this.#shown;
  }

  /** Opens by changing the address. With `focus` the panel gets the focus, and gives it back when it is closed. */
  open(kind, name, { focus = false } = {}) {
    const hash = `#${kind}=${encodeURIComponent(name)}`;
    if (focus) this.#opener = document.activeElement;
    if (location.hash !== hash) history.replaceState(null, "", hash);
    this.follow();
    if (focus || narrow.matches) byId("panel-title").focus();
  }

  close() {
    if (!this.#shown) return;
    const { kind, name } = this.#shown;
    const hadFocus = this.aside.contains(document.activeElement);
    history.replaceState(null, "", location.pathname + location.search);
    this.follow();
    const opener = this.#opener;
    this.#opener = null;
    if (!hadFocus) return;
    if (opener?.isConnected) opener.focus();
    else this.contents[kind].focusBack?.(name);
  }

  /** Shows what the address says. */
  follow() {
    const wanted = parseHash(location.hash);
    const same =
      wanted && this.#shown && wanted.kind === this.#shown.kind && wanted.name === this.#shown.name;
    if (same) return;
    this.#content?.close?.();
    this.#shown = wanted;
    this.#content = wanted && this.contents[wanted.kind];
    const body = byId("panel-body");
    body.replaceChildren();
    body.scrollTop = 0;
    setHidden(this.aside, !wanted);
    document.body.classList.toggle("with-panel", Boolean(wanted));
    if (wanted) {
      setText(byId("panel-title"), this.#content.title(wanted.name));
      this.#content.open(body, wanted.name);
    }
    this.#cover();
    this.changed(wanted);
  }

  draw() {
    this.#content?.draw();
  }

  /** On a narrow screen the panel covers the rest, which cannot be reached then. */
  #cover() {
    const covered = Boolean(this.#shown) && narrow.matches;
    byId("main").inert = covered;
    byId("head").inert = covered;
  }
}
