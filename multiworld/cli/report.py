"""``python -m multiworld report``: reports of breakages, put together and explained."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multiworld._core.operations.lateness import waited_for
from multiworld._core.operations.report import from_dict
from multiworld._core.operations.waiting import pending_operations
from multiworld.cli.console import say
from multiworld.errors import MultiworldError

if TYPE_CHECKING:
    import argparse

    from multiworld._core.operations.report import MemberReport, Operation

__all__ = ["SUMMARY", "configure_parser", "execute", "explained"]

SUMMARY = "explain why a world broke, from the reports of its members"

_SHOWN = 5
"""Operations that are shown of each member, unless all are asked for."""

Fields = dict[str, Any]


def configure_parser(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = f"{SUMMARY[0].upper()}{SUMMARY[1:]}: files that they wrote into the folder M8D_REPORTS, or such folders."
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE", help="a report, or a folder of them")
    parser.add_argument("--all", action="store_true", help=f"show all operations, not the last {_SHOWN}")


def execute(args: argparse.Namespace) -> int:
    """Run the command; return its exit code.

    Raises:
        MultiworldError: a file is no report.
    """
    files = [
        file for path in args.paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])
    ]
    if not files:
        raise MultiworldError(
            f"no report in {', '.join(map(str, args.paths))}",
            rule="Members write theirs where M8D_REPORTS names a folder, when their world breaks",
            next_step="Set it on all members, and name that folder here",
        )
    breakages: dict[tuple[str, int, str], list[Fields]] = {}
    for file in files:
        found = _read(file)
        breakages.setdefault((found["world"], found["generation"], found["id"]), []).append(found)
    ordered = sorted(breakages.values(), key=lambda each: min(one["broke_at"] for one in each))
    say("\n\n".join(explained(each, shown=None if args.all else _SHOWN) for each in ordered))
    return 0


def _read(path: Path) -> Fields:
    wanted = {"world": str, "generation": int, "id": str, "rank": int, "broke_at": float, "cause": str,
              "ranks": list, "detail": str, "members": list, "reports": list}  # fmt: skip
    try:
        found = json.loads(path.read_text())
        if found["format"] == 1 and _fits(found, wanted) and _has_members(found):
            time.gmtime(found["broke_at"])
            return dict(found)
        why = "it has other fields"
    except OSError as error:  # a time that gmtime does not take is one, too
        why = error.strerror or str(error)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
    raise MultiworldError(
        f"{path} is no report of a breakage: {why}",
        rule="A report is a JSON file that a member wrote, in format 1",
        next_step="Name such files, or the folder that M8D_REPORTS named",
    )


def _fits(fields: Any, wanted: dict[str, type]) -> bool:
    return all(isinstance(fields[name], kind) for name, kind in wanted.items())


def _has_members(found: Fields) -> bool:
    member = {"rank": int, "pid": int, "hostname": str}
    ranks = all(isinstance(each, int) for each in found["ranks"])
    return ranks and all(_fits(each, member) for each in found["members"])


def explained(breakage: list[Fields], *, shown: int | None = _SHOWN) -> str:
    """Put the reports of one breakage into one page of text.

    Args:
        breakage: one report or more, of members of the same generation.
        shown: operations of each member at most; None: all.
    """
    first = min(breakage, key=lambda each: each["broke_at"])
    reports = _best(breakage)
    lost = set(first["ranks"])
    writers = sorted(each["rank"] for each in breakage)
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(first["broke_at"]))
    lines = [
        f"World {first['world']!r}, generation {first['generation']}, broke at {at} UTC: {first['cause']}",
        f"  {first['detail']}",
        f"  reports of {_ranks(writers)}; {len(first['members'])} members",
    ]
    others = {(each["cause"], tuple(each["ranks"])) for each in breakage}
    if len(others) > 1:
        lines.append("  The members do not agree on the cause: " + "; ".join(
            f"rank {each['rank']}: {each['cause']} of {each['ranks']}" for each in breakage
        ))  # fmt: skip
    whole: dict[int, MemberReport | None] = {
        each["rank"]: reports.get(each["rank"]) for each in first["members"]
    }
    silent = dict.fromkeys(lost, "is lost")
    waits = [str(each) for each in pending_operations(whole, silent)]
    lines += ["", "Waiting when it broke:", *(f"  {each}" for each in waits or ["no operation"])]
    waited = {rank: seconds for rank, seconds in waited_for(whole).items() if seconds}
    if waited:
        total = sum(waited.values())
        lines += ["", "Waited for in the last collectives:"]
        lines += [
            f"  rank {rank}: {seconds:.3f} s, {seconds / total:.0%}"
            for rank, seconds in sorted(waited.items(), key=lambda each: -each[1])
        ]
    lines += ["", "Last operations of each member, the last one first:"]
    for member in first["members"]:
        rank = member["rank"]
        where = f"rank {rank} (pid {member['pid']} on {member['hostname']})"
        report = reports.get(rank)
        if report is None:
            lines.append(f"  {where}: {'lost' if rank in lost else 'did not answer'}")
            continue
        lines.append(f"  {where}:")
        lines += [f"    {_line(each)}" for each in report.operations[::-1][:shown]] or ["    none"]
    return "\n".join(lines)


def _best(breakage: list[Fields]) -> dict[int, MemberReport]:
    """Take what each member wrote of itself, else what it told another one."""
    found: dict[int, MemberReport] = {}
    for each in sorted(breakage, key=lambda one: one["rank"]):
        for fields in each["reports"]:
            report = from_dict(fields)
            if report is not None and (report.rank == each["rank"] or report.rank not in found):
                found[report.rank] = report
    return found


def _line(each: Operation) -> str:
    group = "" if each.group == 0 else f" in the group of ranks {', '.join(map(str, each.ranks))}"
    if each.pending:
        state = f"waiting since {each.began:.3f} s"
    elif each.ended is None:
        state = f"posted {each.began:.3f} s before, over or not waited for"
    else:
        state = f"took {max(0.0, each.began - each.ended) * 1e3:.3g} ms, ended {each.ended:.3f} s before"
    return f"{each.name} of {each.size} bytes{group}: {state}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
