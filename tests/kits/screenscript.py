"""Run on a terminal of its own by test_run_screen: a run that is shown while its workers and torch's tailing write.

Arguments: the folder of the workers' log files.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from pathlib import Path

from kits.runstatekit import begun, killed
from multiworld.run import events as h
from multiworld.run.view.screen import open_screen
from multiworld.run.view.state import RunState


def main() -> None:
    handler = logging.StreamHandler()  # holds the standard error of now, as torch's loggers do
    logging.getLogger("torch.something").addHandler(handler)
    state = RunState()
    screen = open_screen(state)
    assert screen is not None
    for each in begun():
        state.apply(each)
    before = handler.stream
    screen.start()
    assert handler.stream is sys.stderr is not before
    tail = threading.Thread(target=_tail, args=(sys.stdout, "OUT"))
    tail.start()
    sys.stderr.write("ERR line\n")
    logging.getLogger("torch.something").warning("LOG line")
    for each in killed(3):
        state.apply(each)
        time.sleep(0.05)
    tail.join()
    state.apply(h.RunEnded(time.time(), 0, "all workers ended"))
    screen.stop()
    assert handler.stream is sys.stderr is before
    sys.stdout.write("AFTER the view\n")
    logging.getLogger("torch.something").warning("LOG after")
    assert sys.stdout.fileno() == 1
    Path(sys.argv[1]).write_text(type(sys.stdout).__name__)


def _tail(out, name: str) -> None:
    """As torch's tail_logfile: to the stream that was there when the workers were started."""
    for at in range(20):
        out.write(f"[worker0]:{name} {at}\x1b[2J\x1b[31m red\n")
        time.sleep(0.02)
    out.write("half a line")


if __name__ == "__main__":
    main()
