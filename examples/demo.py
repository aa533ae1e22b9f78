"""Demo of multiworld, on one page: `nox -s demo`, or `python examples/demo.py` (live with rich installed).

A hub is in four worlds, with one worker in each, and exchanges messages in all of them. One worker is killed, one is
stopped; their worlds break, the others go on; both come back. Ends with 0 only if all of that went as it should.
"""

from __future__ import annotations

import _ctrl_c  # noqa: F401  (first: Ctrl-C is quiet from here on)

import argparse
import signal
import sys
import time

from _demo_stage import Stage


def hurt(stage: Stage, name: str, sign: signal.Signals, cause: str, seconds: float) -> None:
    """Send `sign` to a worker, and see its world break and the others go on."""
    stage.expected = {name}
    before = dict(stage.counted[1])
    at = time.monotonic()
    stage.signal(name, sign)
    stage.screen.say(f"{sign.name} for the worker of {name}", "bold")
    seen = stage.wait(f"{name} breaks", lambda e: e["event"] == "broken" and e["world"] == name)
    took = 1000 * (seen["now"] - at)
    ranks = ", ".join(map(str, seen["ranks"])) or "unknown"
    stage.screen.say(
        f"{name} broke: {seen['cause']}, rank {ranks}, {took:.1f} ms after {sign.name} ({seen['text']})",
        "red",
    )
    # What hangs is noticed after the hang_timeout, with room for a busy machine; what crashed long before.
    within = 1000 * stage.hang_timeout * (2 if cause == "hung" else 1)
    if (seen["cause"], seen["ranks"]) != (cause, [1]) or took > within:
        stage.fault(f"expected: {cause}, rank 1, within {within:.0f} ms")
    stage.watch(seconds)
    until = time.monotonic()
    stage.wait("the hub's next report", lambda e: e["event"] == "rates" and e["now"] >= until)
    healthy = [other for other, lane in stage.lanes.items() if lane.state == "active"]
    now, counts = stage.counted
    rates = {other: (counts[other] - before[other]) / (now - at) for other in healthy}
    stage.screen.say(
        "went on: " + ", ".join(f"{other} {rate:.0f} messages/s" for other, rate in rates.items()), "green"
    )
    for other, rate in rates.items():
        if rate <= 1:
            stage.fault(f"{other} stood still")


def play(stage: Stage, seconds: float) -> None:
    """The story."""
    stage.start_hub()
    stage.wait("the hub's port", lambda e: e["event"] == "port")
    for name in stage.lanes:
        stage.start(name)
    stage.wait("all worlds active", lambda _: all(lane.state == "active" for lane in stage.lanes.values()))
    stage.watch(seconds)
    hurt(stage, "w2", signal.SIGKILL, "crashed", seconds)
    hurt(stage, "w3", signal.SIGSTOP, "hung", seconds)
    stage.screen.say("a new worker for w2; the worker of w3 goes on", "bold")
    stage.start("w2")
    stage.signal("w3", signal.SIGCONT)
    stage.wait(
        "w2 and w3 are back", lambda _: all(stage.lanes[name].generation == 2 for name in ("w2", "w3"))
    )
    stage.expected = set()
    stage.watch(seconds)
    stage.end_hub()
    end = stage.wait("the hub ends", lambda e: e["event"] == "end")
    if end["wrong"] or end["late"]:
        stage.fault(f"{end['wrong']} wrong messages; not ended: {end['late']}")
    for name, code in stage.ends():
        if code != 0:
            stage.fault(f"{name} {'did not end' if code is None else f'ended with {code}'}")
    total = sum(stage.counted[1].values())
    stage.screen.say(
        f"{total} messages, none wrong; every process ended by itself"
        if not stage.faults
        else "not as it should be",
        "bold",
    )


def main() -> int:
    """Play, and say whether it went well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pause", type=float, default=4.0, help="seconds to look at each state")
    parser.add_argument("--hang-timeout", type=float, default=1.0, help="seconds; worlds have 5 by default")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends everything, as Ctrl-C does
    with Stage(args.hang_timeout) as stage:
        try:
            play(stage, args.pause)
        except TimeoutError as error:
            stage.fault(str(error))
        return int(bool(stage.faults))
    return 130  # Ctrl-C


if __name__ == "__main__":
    sys.exit(main())
