"""What a run of CI leaves out, and how much of it there was: read from ``tests/ci.toml``, held here.

Each run of pytest in CI judges its own skips and second looks and leaves a record in the folder that
``M8D_CI_RECORD`` names; ``python tests/evidence.py FOLDER`` puts the records together at the end, lists them, and fails
where a part had fewer passed tests than it must have. Elsewhere (no such variable) nothing of this happens.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Record", "Rules", "SecondLook", "Skip", "load", "main", "part_of", "reason_of", "seen", "summary"]

HERE = Path(__file__).parent
RULES = HERE / "ci.toml"


@dataclass(frozen=True)
class Skip:
    """A skip that CI may have.

    Attributes:
        test: node ids, as fnmatch has it ("tests/contract/torch_itself/test_shim.py::*"); "[" stands for itself.
        reason: what pytest says, the same way.
        why: why it may be left out, or where it runs instead.
        most: tests at most that one run of pytest may leave out by this.
    """

    test: str
    reason: str
    why: str
    most: int = 1

    def matches(self, node: str, reason: str) -> bool:
        """Whether it is about this one."""
        return _like(node, self.test) and _like(reason, self.reason)


@dataclass(frozen=True)
class SecondLook:
    """A test that CI may run again when it failed.

    Attributes:
        test: its node id, with or without the parameters, or a pattern as in `Skip`.
        reason: why its failure may say nothing of the code.
        most: looks at most that one run of pytest may have by this.
    """

    test: str
    reason: str
    most: int = 1

    def matches(self, node: str) -> bool:
        """Whether it is about this one."""
        return _like(node, self.test) or node.partition("[")[0] == self.test


@dataclass(frozen=True)
class Rules:
    """``tests/ci.toml``.

    Attributes:
        parts: passed tests at least, by part (`part_of`; as fnmatch has it).
        skips: what may be left out.
        second_looks: what may be run again.
    """

    parts: dict[str, int]
    skips: tuple[Skip, ...]
    second_looks: tuple[SecondLook, ...]

    def new_skips(self, skipped: Iterable[tuple[str, str]]) -> list[str]:
        """Say which skips of one run are not allowed, as lines."""
        complaints, used = [], Counter[Skip]()
        for node, reason in skipped:
            allowed = next((each for each in self.skips if each.matches(node, reason)), None)
            if allowed is None:
                complaints.append(f"{node}: {reason}: tests/ci.toml does not allow it")
                continue
            used[allowed] += 1
            if used[allowed] == allowed.most + 1:
                complaints.append(f"{node}: {reason}: {allowed.most} at most may be skipped for it")
        return complaints

    def why(self, node: str, reason: str) -> str:
        """Return why a skip may be."""
        return next((each.why for each in self.skips if each.matches(node, reason)), "not allowed")

    def second_look(self, node: str) -> SecondLook | None:
        """Return the entry of a test that may be run again."""
        return next((each for each in self.second_looks if each.matches(node)), None)

    def too_many_looks(self, looks: Iterable[str]) -> list[str]:
        """Say for which entries one run had too many second looks, as lines."""
        used = Counter(entry for node in looks if (entry := self.second_look(node)) is not None)
        return [
            f"{entry.test}: {count} second looks, {entry.most} may be an accident"
            for entry, count in used.items()
            if count > entry.most
        ]

    def too_few(self, passed: dict[str, int], left_out: Collection[str] = ()) -> list[str]:
        """Say which parts have too few passed tests, as lines.

        Args:
            passed: how many, by part.
            left_out: parts with files that were skipped whole, for a reason that `new_skips` judges: nothing is asked
                of one of which nothing ran.
        """
        complaints = []
        for part, least in self.parts.items():
            counts = {name: count for name, count in passed.items() if fnmatch.fnmatchcase(name, part)}
            if not counts and part in left_out:
                continue
            complaints += [
                f"{name}: {count} passed, {least} at least are expected"
                for name, count in (counts or {part: 0}).items()
                if count < least
            ]
        return complaints


@dataclass(frozen=True)
class Record:
    """What one run of pytest leaves.

    Attributes:
        passed: node ids, by part.
        skipped: node id and reason.
        second_looks: those that failed at first: node id, and what was seen (`seen`).
        failed: those that failed, the same way.
        refused: what this run must not have, as lines.
    """

    passed: dict[str, list[str]]
    skipped: list[tuple[str, str]]
    second_looks: list[tuple[str, str]]
    failed: list[tuple[str, str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> Path:
        """Write it into a folder, under a name of its own."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{len([*folder.glob('*.json')]):03d}-{id(self):x}.json"
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read one."""
        data = json.loads(path.read_text(encoding="utf-8"))
        pairs = {
            name: [(node, text) for node, text in data[name]]
            for name in ("skipped", "second_looks", "failed")
        }
        return cls(data["passed"], **pairs, refused=data["refused"])


def load(path: Path = RULES) -> Rules:
    """Read the rules."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    return Rules(
        data["parts"],
        tuple(Skip(**each) for each in data.get("skip", ())),
        tuple(SecondLook(**each) for each in data.get("second_look", ())),
    )


def part_of(node: str, beds: Sequence[str] = ()) -> str:
    """Return the part a test belongs to: its folder below tests/; on the test bed with the kind of build."""
    folder = node.split("/")[1] if node.startswith("tests/") and node.count("/") > 1 else "other"
    kinds = "+".join(sorted({name.partition("=")[0].rpartition("-")[0] or name for name in beds}))
    return f"{folder} {kinds}" if folder == "testbed" and kinds else folder


def reason_of(longrepr: object) -> str:
    """Return the words of a skip."""
    text = str(longrepr[2]) if isinstance(longrepr, tuple) and len(longrepr) == 3 else str(longrepr)
    return text.removeprefix("Skipped: ").strip()


def seen(longrepr: str, most: int = 12) -> str:
    """Return the lines of a failure's report that say what failed, `most` at most: the errors, and where."""
    lines = longrepr.splitlines()
    telling = [line for line in lines if line.startswith(("E ", "> "))] + lines[-1:]
    return "\n".join(telling[:most])


def stacks(stderr: str, frames: int = 4) -> str:
    """Return where a stuck process's threads were, from what faulthandler wrote: of each thread the last calls."""
    found, left = [], 0
    for line in stderr.splitlines():
        if "most recent call first" in line:
            left = frames + 1
        elif not line.startswith("  "):
            left = 0
        if left > 0:
            found.append(line)
            left -= 1
    return "\n".join(found)


def summary(records: Iterable[Record], rules: Rules) -> tuple[list[str], list[str]]:
    """Return what CI shows at its end, and what is wrong with it, as lines; what a reader looks for comes last."""
    passed: dict[str, set[str]] = {}
    skipped: Counter[tuple[str, str]] = Counter()
    looks, failed, wrong = [], [], []
    for record in records:
        for part, nodes in record.passed.items():
            passed.setdefault(part, set()).update(nodes)
        skipped.update({(node.partition("[")[0], reason) for node, reason in record.skipped})
        looks += record.second_looks
        failed += record.failed
        wrong += record.refused
    counts = {part: len(nodes) for part, nodes in sorted(passed.items())}
    left_out = {part_of(node) for node, _ in skipped if "::" not in node}
    lines = [f"skipped: {node}: {reason} ({rules.why(node, reason)})" for node, reason in sorted(skipped)]
    lines += [f"passed in {part}: {count}" for part, count in counts.items()]
    for node, text in sorted(looks):
        entry = rules.second_look(node)
        lines.append(f"second look: {node} ({'not allowed' if entry is None else entry.reason}):\n{text}")
    lines += [] if looks else ["second looks: none"]
    lines += [f"failed: {node}:\n{text}" for node, text in sorted(failed)]
    return lines, [*wrong, *(f"too few tests: {each}" for each in rules.too_few(counts, left_out))]


def _like(text: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))


def main(argv: Sequence[str]) -> int:
    """List the records of a folder; 1 if a part has too few passed tests, or a run what it must not have."""
    (folder,) = argv
    lines, wrong = summary(map(Record.read, sorted(Path(folder).glob("*.json"))), load())
    print(*lines, *(f"must not be: {each}" for each in wrong), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
