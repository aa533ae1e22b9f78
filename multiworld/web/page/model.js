// What the server last said: a view, and the patches since.

const EVENTS = 500;
const FAULTS = 50;

const HEAD = { title: "", note: "", run: null, kind: "", totals: {} }; // and what stands for none

export class Model {
  constructor() {
    this.loaded = false;
    Object.assign(this, HEAD);
    this.processes = new Map();
    this.worlds = new Map();
    this.faults = [];
    this.events = [];
  }

  /** Takes a whole view. Returns what may have changed. */
  replace(view) {
    const worlds = new Set(this.worlds.keys());
    for (const [key, none] of Object.entries(HEAD)) this[key] = view[key] ?? none;
    this.worlds = new Map((view.worlds ?? []).map((world) => [world.name, { ...world, told: view.now }]));
    this.processes = new Map((view.processes ?? []).map((process) => [process.id, process]));
    this.faults = (view.faults ?? []).slice(0, FAULTS);
    this.events = (view.events ?? []).slice(-EVENTS);
    this.loaded = true;
    for (const name of this.worlds.keys()) worlds.add(name);
    return { worlds, processes: true, faults: true, events: true };
  }

  /** Takes a patch. Returns what has changed. */
  patch(patch) {
    Object.assign(this, Object.fromEntries(Object.entries(patch.set ?? {}).filter(([key]) => key in HEAD)));
    const worlds = new Set();
    for (const world of patch.worlds ?? []) {
      this.worlds.set(world.name, { ...world, told: patch.now });
      worlds.add(world.name);
    }
    for (const name of patch.worlds_gone ?? []) {
      this.worlds.delete(name);
      worlds.add(name);
    }
    for (const process of patch.processes ?? []) this.processes.set(process.id, process);
    for (const id of patch.processes_gone ?? []) this.processes.delete(id);
    const faults = Boolean(patch.faults?.length || patch.faults_gone?.length);
    if (faults) this.#mergeFaults(patch.faults ?? [], patch.faults_gone ?? []);
    if (patch.events?.length) this.#mergeEvents(patch.events);
    return {
      worlds,
      processes: Boolean(patch.processes?.length || patch.processes_gone?.length),
      faults,
      events: Boolean(patch.events?.length),
    };
  }

  #mergeFaults(changed, gone) {
    const faults = new Map(this.faults.map((fault) => [fault.id, fault]));
    for (const id of gone) faults.delete(id);
    for (const fault of changed) faults.set(fault.id, fault);
    this.faults = [...faults.values()].sort((a, b) => b.at - a.at).slice(0, FAULTS);
  }

  #mergeEvents(added) {
    const last = this.events.at(-1)?.id ?? -Infinity;
    this.events = [...this.events, ...added.filter((event) => event.id > last)].slice(-EVENTS);
  }
}
