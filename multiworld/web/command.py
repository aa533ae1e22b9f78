"""``m8d-run web``: the page of a run that is running on this host. ``m8d-run --web`` starts it, too."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from multiworld import settings
from multiworld._net.listen_address import DEFAULT
from multiworld.cli.console import complain, say
from multiworld.errors import MultiworldError
from multiworld.run.control.client import LauncherSilentError
from multiworld.run.control.commands import REFUSED, find_run
from multiworld.run.view.status import NONE, SILENT
from multiworld.web.run_certificate import variables_of
from multiworld.web.server import EXPOSED, serve
from multiworld.web.sources import LaunchedRun

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``m8d-run web``; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="m8d-run web",
        description="Serve a page that shows a run: its worlds, members, faults, what waits, and logs. It "
        "needs pip install 'm8d[web]'.",
        epilog=f"Exit code: 0; {NONE}: there is no such run here; {REFUSED}: it cannot be served like this; "
        f"{SILENT}: its launcher does not answer.",
    )
    parser.add_argument("run", nargs="?", default="", metavar="RUN", help="id of the run, or how it begins")
    parser.add_argument(
        "--at", default=DEFAULT, metavar="HOST:PORT", help=f"where to listen; port 0: a free one ({DEFAULT})"
    )
    parser.add_argument("--socket", help=argparse.SUPPRESS)  # of the launcher that starts this
    args = parser.parse_args(argv)
    if args.socket:
        path: Path | None = Path(args.socket)
    else:
        path, code, why = find_run(args.run)
        if path is None:
            complain(f"m8d-run web: {why}")
            return code
    assert path is not None  # noqa: S101  (else it has returned)
    before: dict[str, str | None] = {}
    try:
        if not args.socket:  # the launcher's own page has its environment
            before = settings.set_environment(variables_of(path))
        page = serve(LaunchedRun(path), args.at)
    except LauncherSilentError as error:
        complain(f"m8d-run web: {error}")
        return SILENT
    except MultiworldError as error:
        complain(f"m8d-run web: {error}")
        return REFUSED
    finally:
        settings.set_environment(before)
    with page, contextlib.suppress(KeyboardInterrupt):
        trust = f" (trusted with: curl --cacert {shlex.quote(page.ca)})" if page.ca else ""
        warning = f"\n{EXPOSED % page.url}" if page.exposed else ""
        if args.socket:  # a line with the address, and others that warn
            say(f"{page.link}{trust}{warning}\n")
        else:
            say(f"page: {page.link}{trust}{warning}\nIt is served until Ctrl-C.")
        if args.socket:
            sys.stdin.read()  # the launcher's end of the pipe closes with it, however it ends
        else:
            threading.Event().wait()
    return 0
