// Work that changes the page, at most a few milliseconds in each frame. No frames come while the page is hidden, so
// nothing works then; a job that is given again under its key waits only once.

const BUDGET = 8; // ms of each frame

const jobs = new Map();
let asked = false;

function frame(started) {
  asked = false;
  const until = Math.max(started, performance.now()) + BUDGET;
  for (const [key, job] of jobs) {
    jobs.delete(key);
    job();
    if (performance.now() > until) break;
  }
  if (jobs.size) ask();
}

function ask() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(frame);
}

/** Runs `job` in one of the next frames. */
export function soon(key, job) {
  if (!jobs.has(key)) jobs.set(key, job);
  ask();
}
