"""Parser of a worlds file's text to a `WorldsPlan`, with all rules that need only the text. Pure."""

from __future__ import annotations

import difflib
import re
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from multiworld.run.errors import PlanError
from multiworld.run.worldsfile.positions import Positions
from multiworld.run.worldsfile.worlds_plan import LAUNCHER, PlannedMember, PlannedWorld, Role, WorldsPlan
from multiworld.settings import MAX_TIMEOUT, MIN_HANG_TIMEOUT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["parse"]

_MOST_WORKERS = 100_000
_INDEX = "{i}"
_LOCAL_RANK = "{local_rank}"
_WORLD_KEYS = (
    "members", "backend", "store", "timeout", "hang_timeout", "device", "after", "for", "size", "last_call",
)  # fmt: skip
_MEMBER_RULE = 'A member is "role:index", or "role:*" for all workers of a role'


def parse(text: str, path: str) -> WorldsPlan:
    """Read the text of a worlds file.

    Args:
        text: TOML.
        path: of the file, for messages.

    Raises:
        PlanError: it is no TOML, or breaks a rule; with the line.
    """
    try:
        said = tomllib.loads(text)
    except (ValueError, RecursionError) as exc:
        where = re.search(r"\s*\(at line (\d+), column \d+\)", str(exc))
        raise PlanError(
            str(exc).replace(where[0], "") if where else str(exc),
            path=path,
            line=int(where[1]) if where else text.count("\n") + 1,
            rule="A worlds file is TOML",
            next_step="Mend that line",
        ) from exc
    return _Reader(path, Positions(text)).plan(said)


class _Reader:
    def __init__(self, path: str, positions: Positions) -> None:
        self._path = path
        self._positions = positions
        self._roles: tuple[Role, ...] = ()
        self._keys: dict[str, str] = {}  # of each world, its table's: a pattern's own

    def plan(self, said: dict[str, Any]) -> WorldsPlan:
        self._known(said, ("roles", "worlds"), "A worlds file")
        roles = self._table(said.get("roles", {}), "roles")
        self._roles = tuple(self._role(name, value) for name, value in roles.items())
        if not self._roles:
            raise self._fault(
                "no roles", "A worlds file has a table [roles]", 'Begin it with "[roles]"', "roles"
            )
        total = sum(role.count for role in self._roles)
        if total > _MOST_WORKERS:
            raise self._fault(
                f"{total} workers", f"They are at most {_MOST_WORKERS}", "Lower the counts", "roles"
            )
        worlds: dict[str, PlannedWorld] = {}
        for key, value in self._table(said.get("worlds", {}), "worlds").items():
            for world in self._worlds(key, value):
                if world.name in worlds:
                    raise self._fault(
                        f"world {world.name!r} is there twice: on line {worlds[world.name].line} too",
                        "A world's name is its own, those made from a pattern included",
                        "Rename one of them",
                        "worlds",
                        key,
                    )
                worlds[world.name] = world
                self._keys[world.name] = key
        self._check_order(worlds)
        return WorldsPlan(self._roles, tuple(worlds.values()), self._path)

    # -- roles

    def _role(self, name: str, value: Any) -> Role:
        at: tuple[str, ...] = ("roles", name)
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", name):
            raise self._fault(
                f"role {name!r}",
                "A role's name is 1 to 100 letters, digits, dots, dashes and underscores",
                "Give it another name",
                *at,
            )
        count = value
        if isinstance(value, dict):
            self._known(value, ("count",), f"Role {name!r}", *at)
            at, count = (*at, "count"), value.get("count")
        sizes = _sizes(count)
        if sizes is None or sizes[1] > _MOST_WORKERS:
            raise self._fault(
                f"role {name!r}: count {_shown(count)}",
                f'It is a whole number from 1 to {_MOST_WORKERS}, or a range "MIN:MAX" of them',
                f'Say how many, as in "{name} = 8"',
                *at,
            )
        least, most = sizes
        return Role(name, most, self._positions.line("roles", name), least if least < most else 0)

    def _role_named(self, name: str, found: str, *at: str, text: str = "") -> Role:
        names = [role.name for role in self._roles]
        if name not in names:
            raise self._fault(
                f"{found}: there is no role {name!r}{_nearest(name, names)}",
                f"The roles are {', '.join(names)}",
                "Name one of them, or add it to [roles]",
                *at,
                text=text,
            )
        return self._roles[names.index(name)]

    # -- worlds

    def _worlds(self, key: str, value: Any) -> list[PlannedWorld]:
        """Return the world of one table; of a pattern, one for each index."""
        at = ("worlds", key)
        said = self._table(value, *at)
        self._known(said, _WORLD_KEYS, f"World {key!r}", *at)
        if "for" not in said:
            if _INDEX in key:
                raise self._fault(
                    f"world {key!r}", f"{_INDEX} needs a role to count", 'Add for = "ROLE"', *at
                )
            return [self._world(key, said, at, key)]
        counted = self._text(said, "for", at)
        role = self._role_named(counted, f"world {key!r} for {counted!r}", *at, "for")
        if _INDEX not in key:
            raise self._fault(
                f"world {key!r} is made for each {role.name}",
                f"Each world has a name of its own: the pattern's contains {_INDEX}",
                f'Name it like [worlds."{key}{_INDEX}"]',
                *at,
            )
        return [
            self._world(key.replace(_INDEX, str(i)), _filled(said, str(i)), at, key)
            for i in range(role.count)
        ]

    def _world(self, name: str, said: Mapping[str, Any], at: tuple[str, ...], key: str) -> PlannedWorld:
        if not 1 <= len(name) <= 200:
            raise self._fault(
                f"world {name!r}", "A name is text of 1 to 200 characters", "Give another name", *at
            )
        members = self._members(name, said, at)
        least, most = self._size(name, said, at, members)
        return PlannedWorld(
            name=name,
            members=members,
            backend=self._text(said, "backend", at, "gloo").lower(),
            store=self._text(said, "store", at, LAUNCHER),
            timeout=self._seconds(said, "timeout", at),
            hang_timeout=self._seconds(said, "hang_timeout", at, MIN_HANG_TIMEOUT),
            device=self._device(said, at),
            after=tuple(dict.fromkeys(self._list(said, "after", at))),
            line=self._positions.line("worlds", key),
            least=least,
            most=most,
            last_call=self._last_call(said, at, assigned=least > 0),
        )

    def _size(
        self, name: str, said: Mapping[str, Any], at: tuple[str, ...], members: tuple[PlannedMember, ...]
    ) -> tuple[int, int]:
        """Return the range of a world's sizes; (0, 0) where all members have the ranks of the file."""
        listed = Counter(member.role for member in members)
        roles = [role for role in self._roles if role.name in listed]
        # Of a role of a range any may be missing: those that the world does not list come first.
        always = sum(max(0, role.needed - (role.count - listed[role.name])) for role in roles)
        if "size" not in said:
            if any(role.least for role in roles):
                return max(1, always), len(members)
            return 0, 0
        sizes = _sizes(said["size"])
        if sizes is None:
            raise self._fault(
                f"world {name!r}: size {_shown(said['size'])}",
                'It is a whole number from 1, or a range "MIN:MAX" of them',
                f'Write it like size = "1:{len(members)}"',
                *at,
                "size",
            )
        least, most = sizes
        if most > len(members):
            raise self._fault(
                f"world {name!r}: size {_shown(said['size'])}, and {len(members)} members",
                "A world is not larger than all its members together",
                f"Give a range up to {len(members)}, or name more members",
                *at,
                "size",
            )
        if least > max(1, always):
            raise self._fault(
                f"world {name!r}: size {_shown(said['size'])}, and its roles may be down to {always} members",
                "There are always enough workers for a world's smallest size",
                f"Begin the range at {max(1, always)}, or raise the smallest number of a role",
                *at,
                "size",
            )
        return sizes

    def _last_call(self, said: Mapping[str, Any], at: tuple[str, ...], *, assigned: bool) -> float | None:
        if "last_call" in said and not assigned:
            raise self._fault(
                "last_call in a world of one size",
                "It says for how long further members are waited for, where the size may change",
                'Give the world a size = "MIN:MAX", or take it out',
                *at,
                "last_call",
            )
        return self._seconds(said, "last_call", at, zero=True)

    def _members(self, name: str, said: Mapping[str, Any], at: tuple[str, ...]) -> tuple[PlannedMember, ...]:
        at = (*at, "members")
        if "members" not in said:
            raise self._fault(
                f"world {name!r} has no members", _MEMBER_RULE, 'Add members = ["ROLE:0", "ROLE:1"]', *at
            )
        members: dict[PlannedMember, None] = {}
        for text in self._list(said, "members", at[:-1]):
            for member in self._member(text, name, at):
                if member in members:
                    raise self._fault(
                        f"world {name!r}: {member} is a member twice",
                        "Each worker has one rank in a world",
                        "Name it once",
                        *at,
                        text=text,
                    )
                members[member] = None
        if len(members) < 2:
            raise self._fault(
                f"world {name!r} has {len(members)} member{'' if members else 's'}",
                "A world has two members at least",
                "Add a member, or leave the world out",
                *at,
            )
        return tuple(members)

    def _member(self, text: str, name: str, at: tuple[str, ...]) -> Iterable[PlannedMember]:
        role_name, colon, index = text.rpartition(":")
        found = f"world {name!r}: member {text!r}"
        if not colon or (index != "*" and not (index.isascii() and index.isdigit() and len(index) <= 9)):
            raise self._fault(found, _MEMBER_RULE, 'Write it like "worker:0"', *at, text=text)
        role = self._role_named(role_name, found, *at, text=text)
        if index == "*":
            return [PlannedMember(role_name, each) for each in range(role.count)]
        if int(index) >= role.count:
            raise self._fault(
                found,
                f"Role {role_name!r} has {role.count} worker{'s' * (role.count > 1)}: "
                + ("the index is 0" if role.count == 1 else f"indices are 0 to {role.count - 1}"),
                "Name one of them, or raise the role's count",
                *at,
                text=text,
            )
        return [PlannedMember(role_name, int(index))]

    def _check_order(self, worlds: Mapping[str, PlannedWorld]) -> None:
        for world in worlds.values():
            for before in world.after:
                if before not in worlds:
                    raise self._fault(
                        f"world {world.name!r}: after {before!r}: there is no such world"
                        f"{_nearest(before, worlds)}",
                        "A world waits for worlds of this file",
                        "Name one of them, or leave it out",
                        "worlds",
                        self._keys[world.name],
                        "after",
                        text=before,
                    )
        circle = _circle({world.name: world.after for world in worlds.values()})
        if circle:
            raise self._fault(
                f"cycle of waits: {' after '.join(circle)}",
                "No world waits for itself, in however many steps",
                'Take one of these out of "after"',
                "worlds",
                self._keys[circle[0]],
                "after",
            )

    # -- values

    def _known(self, said: Mapping[str, Any], keys: tuple[str, ...], owner: str, *at: str) -> None:
        for key in said:
            if key not in keys:
                raise self._fault(
                    f"unknown key {key!r}{_nearest(key, keys)}",
                    f"{owner} has {', '.join(keys)}",
                    "Rename it, or take it out",
                    *at,
                    key,
                )

    def _table(self, value: Any, *at: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            name = ".".join(at)
            raise self._fault(f"{name} is {_shown(value)}", "It is a table", f'Write it like "[{name}]"', *at)
        return value

    def _text(
        self, said: Mapping[str, Any], key: str, at: tuple[str, ...], default: str | None = None
    ) -> str:
        value = said.get(key, default)
        if not isinstance(value, str) or not value or "\0" in value:
            raise self._fault(
                f"{key} = {_shown(value)}",
                "It is text",
                f'Write it like {key} = "{default or "..."}"',
                *at,
                key,
            )
        return value

    def _list(self, said: Mapping[str, Any], key: str, at: tuple[str, ...]) -> list[str]:
        value = said.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._fault(
                f"{key} = {_shown(value)}",
                "It is a list of texts",
                f'Write it like {key} = ["..."]',
                *at,
                key,
            )
        return value

    def _seconds(
        self,
        said: Mapping[str, Any],
        key: str,
        at: tuple[str, ...],
        least: float = 0.0,
        *,
        zero: bool = False,
    ) -> float | None:
        value = said.get(key)
        if value is None:
            return None
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not least <= value <= MAX_TIMEOUT or (value == 0 and not zero):
            lowest = f"at least {least:g}" if least or zero else "above 0"
            raise self._fault(
                f"{key} = {_shown(value)}",
                f"It is a number of seconds, {lowest}, at most {MAX_TIMEOUT:.0f}",
                f"Write it like {key} = {30 if key == 'timeout' else 5}",
                *at,
                key,
            )
        return float(value)

    def _device(self, said: Mapping[str, Any], at: tuple[str, ...]) -> str | None:
        if "device" not in said:
            return None
        device = self._text(said, "device", at)
        if re.search(r"[{}]", device.replace(_LOCAL_RANK, "")):
            raise self._fault(
                f"device = {device!r}",
                f"What stands in braces is {_LOCAL_RANK}, and {_INDEX} in a pattern",
                f'Write it like device = "cuda:{_LOCAL_RANK}"',
                *at,
                "device",
            )
        return device

    def _fault(self, value: str, rule: str, next_step: str, *at: str, text: str = "") -> PlanError:
        line = self._positions.line_of(text, *at) if text else self._positions.line(*at)
        return PlanError(value, path=self._path, line=line, rule=rule, next_step=next_step)


def _sizes(value: Any) -> tuple[int, int] | None:
    """Return a number, or a range "MIN:MAX", as the smallest and the largest; None where it is none."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}:[0-9]{1,9}", value, re.ASCII):
        least, most = map(int, value.split(":"))
    elif isinstance(value, int) and not isinstance(value, bool):
        least = most = value
    else:
        return None
    return (least, most) if 1 <= least <= most else None


def _shown(value: Any) -> str:
    """Return a value for a message; long ones are cut."""
    if value is None:
        return "is missing"
    text = "{...}" if isinstance(value, dict) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _filled(value: Any, index: str) -> Any:
    if isinstance(value, str):
        return value.replace(_INDEX, index)
    if isinstance(value, list):
        return [_filled(each, index) for each in value]
    if isinstance(value, dict):
        return {key: _filled(each, index) for key, each in value.items()}
    return value


def _circle(after: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return names of worlds that wait for each other in a circle, closed by the first; [] without one."""
    done: set[str] = set()
    for start in after:
        if start in done:
            continue
        trail = [start]
        waits = [iter(after[start])]
        while trail:
            before = next(waits[-1], None)
            if before is None:
                done.add(trail.pop())
                waits.pop()
            elif before in trail:
                return [*trail[trail.index(before) :], before]
            elif before not in done:
                trail.append(before)
                waits.append(iter(after[before]))
    return []
