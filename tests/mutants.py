"""Mutations of what decides, and whether a test fails by each: ``nox -s mutants`` (cosmic-ray does the mutating).

    nox -s mutants                                  # everything that is listed here; many hours
    nox -s mutants -- multiworld/_core/reraise.py   # some of it
    nox -s mutants -- --list

It works in a copy of the tree, one mutation at a time, and shows those that every test survived. Reading them is the
work: a survivor is a test that is missing, code that does nothing, or a change that means the same. Exit status: 0
where there are none, 1 otherwise.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNIT = "tests/unit/core/test_{}.py"
RUN = "tests/unit/run/test_{}.py"
CORE = "multiworld/_core/{}.py"
TESTS: dict[str, tuple[str, ...]] = {
    # decisions
    **{CORE.format(name): tuple(map(UNIT.format, tests)) for name, tests in {
        "client_detection": ("store_clients",),
        "durations": ("durations",),
        "lane/frames": ("lane",),
        "lane/greeting": ("lane_greeting",),
        "lane/incoming": ("lane", "lane_short_ways", "lane_model"),
        "lane/lane": ("lane", "lane_short_ways", "lane_model"),
        "lane/matching": ("lane", "lane_short_ways", "lane_model"),
        "lane/operations": ("lane", "lane_short_ways", "lane_model"),
        "lane/outgoing": ("lane", "lane_short_ways", "lane_model"),
        "lane/peer": ("lane", "lane_short_ways", "lane_model"),
        "lane/schedules": ("lane_schedules",),
        "liveness/actions": ("detector", "watchdog_peers"),
        "liveness/attached": ("watchdog_peers", "detector"),
        "liveness/busy_or_hung": ("busy",),
        "liveness/connection": ("watchdog_peers", "wire"),
        "liveness/connections": ("watchdog_peers",),
        "liveness/detector": ("detector",),
        "liveness/dialing": ("watchdog_peers",),
        "liveness/earliest": ("earliest", "watchdog_peers"),
        "liveness/early_close": ("early_close",),
        "liveness/ended": ("watchdog_peers",),
        "liveness/evidence": ("busy",),
        "liveness/peers": ("watchdog_peers",),
        "liveness/proofs": ("watchdog_peers", "early_close"),
        "liveness/questions": ("questions",),
        "liveness/unread_messages": ("unread_messages",),
        "liveness/wire": ("wire",),
        "operations/lateness": ("operations_lateness",),
        "operations/log": ("operations_log",),
        "operations/report": ("operations_log", "operations_waiting"),
        "operations/totals": ("operations_totals",),
        "operations/waiting": ("operations_waiting",),
        "timeline": ("timeline",),
        "state_machine": ("lifecycle",),
        "membership/ledger": ("membership", "membership_rendezvous"),
        "membership/refusals": ("membership", "membership_rendezvous"),
        "membership/request": ("membership", "membership_rendezvous"),
        "membership/roster": ("membership", "membership_rendezvous"),
        "membership/admission": (
            "membership", "membership_advances", "membership_assigned", "membership_rendezvous",
        ),
        "membership/assigned": ("membership_advances", "membership_assigned", "membership_rendezvous"),
        "membership/letters": ("membership_letters",),
        "membership/state_sources": ("membership_advances",),
        "membership/carrying": ("store_carrying",),
        "membership/majority": ("store_carrying", "store_serving"),
        "membership/serving": ("store_serving",),
        "state_notes": ("state_pieces",),
        "state_pieces": ("state_pieces",),
        "state_tree": ("state_tree",),
        "sampling": ("sampling",),
        "resharding": ("resharding",),
        "weights": ("weights",),
        "membership/reachability": ("reachability",),
        "nccl_policy": ("nccl_policy",),
        "packet_filter": ("packet_filter",),
        "reraise": ("raising",),
    }.items()},
    # the launcher's decisions
    **{f"multiworld/run/{name}.py": tuple(map(RUN.format, tests)) for name, tests in {
        "clusters/defaults": ("run_clusters",),
        "clusters/kubernetes": ("run_clusters",),
        "clusters/slurm": ("run_clusters",),
        "control/looks": ("control_protocol",),
        "control/planned_worlds": ("control_protocol",),
        "control/reports": ("control_protocol", "elastic_feed"),
        "nodes/agreement": ("run_agreement",),
        "nodes/applications": ("run_applications",),
        "nodes/beginnings": ("beginnings",),
        "nodes/loss_verdicts": ("run_loss_verdicts",),
        "nodes/losses": ("run_losses",),
        "nodes/node_news": ("run_node_news",),
        "nodes/rank_assignment": ("run_seats",),
        "nodes/slots": ("run_seats", "run_agreement"),
        "nodes/standing": ("run_standing", "run_done"),
        "nodes/store_health": ("run_store_health",),
        "nodes/votes": ("run_votes",),
        "secure/source": ("secure_parts",),
        "signals": ("run_arrivals", "run_group", "run_scaler"),
        "view/log_filter": ("run_journal",),
        "view/renumbering": ("run_state", "run_journal"),
        "view/state": ("run_state",),
        "view/world_state": ("run_state", "run_ranges_seen"),
        "workers/orphan_reaper": ("guard",),
        "workers/ranks": ("run_restarts", "run_scaler"),
        "workers/restarts": ("run_restarts",),
        "workers/retirements": ("run_scaling", "run_scaler"),
        "workers/scaling": ("run_scaling",),
        "worldsfile/parse": ("worlds_file",),
        "worldsfile/worlds_plan": ("worlds_plan", "worlds_file"),
    }.items()},
    # the edges that are told what to do
    "multiworld/shim/diff.py": ("tests/unit/shim/test_shim_diff.py",),
    "multiworld/_c10d/fault_classification.py": ("tests/contract/faults/test_faults.py",),
    "multiworld/objects.py": ("tests/contract/operations/test_objects.py",),
}  # fmt: skip
"""What is mutated, and the tests that are to fail by it."""
LEFT_OUT = {
    "multiworld/run/view/layout.py": "where words stand on a terminal: a mutation is another look, not another decision",
    "multiworld/run/view/messages.py": "what a line says: tests hold the words that people look for, not each of them",
}
"""Modules of the launcher that call themselves pure and are not mutated, and why."""

# What decides nothing: what a message says, how a type is written.
_UNINTERESTING = "core/(NumberReplacer|RemoveDecorator|ReplaceBinaryOperator_BitOr_.*)"
_CONFIG = """\
[cosmic-ray]
module-path = "{module}"
timeout = {timeout}
excluded-modules = []
test-command = "{python} -m pytest -q -x -p no:cacheprovider --hypothesis-seed=0 {tests}"

[cosmic-ray.distributor]
name = "local"

[cosmic-ray.filters.operators-filter]
exclude-operators = ["{uninteresting}"]
"""


def main(argv: Sequence[str]) -> int:
    """Run the mutations of some modules."""
    parser = argparse.ArgumentParser(
        "nox -s mutants --", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", metavar="FILE", help="default: all that are listed")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS",
        help="the tests of one mutation may take (120); one that takes longer is found",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="name the files and end")
    args = parser.parse_args(argv)
    if args.list:
        print(*(f"{module}: {' '.join(tests)}" for module, tests in TESTS.items()), sep="\n")
        return 0
    unknown = [each for each in args.modules if each not in TESTS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not listed. Look at --list")
    with tempfile.TemporaryDirectory(prefix="m8d-mutants-") as folder:
        tree = _copy(Path(folder) / "tree")
        left = {module: _survivors(tree, module, args.timeout) for module in args.modules or TESTS}
    for module, text in left.items():
        print(f"{module}: {'survivors:' if text else 'every mutation was found'}\n{text}")
    return 1 if any(left.values()) else 0


def _copy(to: Path) -> Path:
    """Copy what git knows of the tree: mutations are made in place."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def _survivors(tree: Path, module: str, timeout: float) -> str:
    """Run the mutations of a module; return the report of those that were not found."""
    config, session = tree / "mutants.toml", tree / "mutants.sqlite"
    session.unlink(missing_ok=True)
    config.write_text(
        _CONFIG.format(
            module=module, timeout=timeout, python=sys.executable, tests=" ".join(TESTS[module]),
            uninteresting=_UNINTERESTING,
        )
    )  # fmt: skip

    def run(*command: str, check: bool = True) -> str:
        done = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, text=True, check=check)
        return done.stdout

    run("cosmic-ray", "baseline", config.name)  # without a mutation the tests pass
    run("cosmic-ray", "init", config.name, session.name, "--force")
    run("cr-filter-operators", session.name, config.name)
    run("cosmic-ray", "exec", config.name, session.name)
    report = run("cr-report", session.name, "--surviving-only", "--show-diff")
    return "" if "SURVIVED" not in report.upper() or "surviving mutants: 0" in report else report


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
