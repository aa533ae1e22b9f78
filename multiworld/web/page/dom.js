// Building and changing elements. Names come from outside: text is only ever set as text.

/** An element with properties (`class`, `text`, `title`, `data-…`, `aria-…`, `on…`) and children. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Sets an element's text, and leaves the DOM alone if it has it. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

export function setHidden(element, hidden) {
  if (element.hidden !== hidden) element.hidden = hidden;
}

/** Moves without losing the focus where the browser can. */
function place(parent, element, before) {
  if (element.parentNode === parent && parent.moveBefore) parent.moveBefore(element, before);
  else parent.insertBefore(element, before);
}

/** Puts `elements` into `parent` in this order with few moves; it holds nothing else afterwards. */
export function arrange(parent, elements) {
  const wanted = new Set(elements);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  let at = parent.firstElementChild;
  for (const element of elements) {
    if (element !== at && at && at.nextElementSibling === element) at = element; // `at` is what moved away
    if (element === at) at = at.nextElementSibling;
    else place(parent, element, at);
  }
  if (focused && document.activeElement !== focused) focused.focus({ preventScroll: true });
}

const keyedChildren = new WeakMap();

/** One child for each item, kept by key: `make(item)` builds it once, `update(child, item)` runs each time. */
export function keyed(parent, items, keyOf, make, update) {
  const old = keyedChildren.get(parent) ?? new Map();
  const next = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (next.has(key)) continue;
    const child = old.get(key) ?? make(item);
    update(child, item);
    next.set(key, child);
  }
  arrange(parent, [...next.values()]);
  keyedChildren.set(parent, next);
}
