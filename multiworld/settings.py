"""Settings: argument > ``M8D_*`` environment variable > default. The only reader and writer of os.environ.

| variable | meaning | default |
|---|---|---|
| ``M8D_HANG_TIMEOUT`` | seconds without a sign of life after which a member is hung (at least 0.3) | 5 |
| ``M8D_BUSY_TIMEOUT`` | seconds for which a silent member that runs counts as busy, then as hung; 0: it is not looked | 60 |
| ``M8D_JOIN_TIMEOUT`` | seconds a join and each operation may take (at least 0.001) | 30 |
| ``M8D_CLOSE_TIMEOUT`` | seconds a close may take | 5 |
| ``M8D_SHIM`` | ``auto``, ``on`` or ``off``: NCCL fault management | auto |
| ``M8D_REQUIRE_PATCH`` | ``1``: a torch build without the patches is an error for NCCL worlds | 0 |
| ``M8D_EARLY_CLOSE`` | ``0``: no early-close connections, for networks whose proxies end idle connections | 1 |
| ``M8D_HOST`` | address, or name, of this host at which the other members reach it | by ``M8D_IFNAME`` |
| ``M8D_IFNAME`` | interface of this host at which they do, by name; several with commas: the first that has an address | what leads to the store, or outward |
| ``M8D_RUN_ID`` | the run that this process belongs to: only members of one run meet | ``TORCHELASTIC_RUN_ID`` |
| ``M8D_LANE`` | ``0``: messages between members go through gloo, not over their own connection; ``p2p``: its collectives do | 1 |
| ``M8D_CHECK`` | ``1``: members compare each collective's kind and sizes first, if all have it so; for debugging | 0 |
| ``M8D_STUCK_AFTER`` | seconds after which an operation that still waits is told, with who is missing; 0: never | 10 |
| ``M8D_REPORTS`` | folder into which each member writes a report when its world breaks (docs/pending.md) | none |
| ``M8D_LOG_LEVEL`` | lines of the log below it are left out (docs/logs.md): ``DEBUG``, ``INFO``, ``WARNING``, ``ERROR`` or ``OFF`` | by the program |
| ``M8D_LOG_FORMAT`` | ``text`` or ``json``: lines of this form on standard error | by the program |
| ``M8D_WEB_TOKEN`` | what requests to the page must have (docs/web.md) | drawn |
| ``M8D_WEB_HOSTS`` | names by which browsers reach the page, beside this host's own, with commas | none |
| ``M8D_TLS_CERT`` | this process's certificate, a PEM file: with the next two, all connections are TLS (docs/security.md) | none |
| ``M8D_TLS_KEY`` | the private key of ``M8D_TLS_CERT``, a PEM file | none |
| ``M8D_TLS_CA`` | the authorities that sign the members' certificates, a PEM file | none |
| ``M8D_TLS_PLAIN`` | backends that may connect without TLS though ``M8D_TLS_CERT`` is set, with commas: ``gloo``, ``nccl``, ... | none |
| ``M8D_GLOO_THREADS`` | threads of each gloo group for its collectives, 1 to 64; 0: 2, from a process's fifth group on 1 | 0 |
"""

from __future__ import annotations

import functools
import logging
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from multiworld.errors import MultiworldError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MAX_TIMEOUT", "MIN_HANG_TIMEOUT", "Settings", "environment", "environment_with", "load", "run_id", "set_default_environment",
    "set_environment",
]  # fmt: skip

MIN_HANG_TIMEOUT = 0.3
"""Seconds. Below it a busy machine's scheduling looks like a hang (contract)."""


_FORMER_NAMES = {"M8D_EARLY_CLOSE": "M8D_TETHERS"}
"""Variables that were renamed: the former name is still read, with a warning."""

MAX_TIMEOUT = 1_000_000.0
"""Seconds, 11.5 days. poll(2) counts milliseconds in 32 bits (24 days); gloo's limit is the same."""


@dataclass(frozen=True)
class Settings:
    """Defaults of arguments.

    Attributes:
        hang_timeout: seconds of silence that make a member hung.
        busy_timeout: seconds of silence that make a member hung though it runs (docs/faults.md); 0: no silent
            member is held to be busy.
        join_timeout: seconds for a join, and for each operation of the world.
        close_timeout: seconds for a close.
        shim: "auto", "on" or "off".
        require_patch: whether an unpatched torch is an error for NCCL worlds.
        early_close: whether a crash is detected before the process's memory is freed (docs/faults.md).
        host: where other members reach this host; "": `ifname`, or what leads to the store.
        ifname: the same, by names of interfaces, with commas.
        lane: whether messages of CPU tensors go over the members' own connection, where all members have it so.
        lane_collectives: whether collectives of CPU tensors do, too.
        check: whether members compare what collective each calls before they begin it, where all have it so.
        gloo_threads: of each gloo group: how many of its collectives can be under way at a time; 0: by their
            number.
        stuck_after: seconds after which an operation that still waits is told; 0: never.
        reports: folder for reports of breakages; "": none are written.
        tls_cert: path of this process's certificate; "": connections are not TLS.
        tls_key: path of its private key.
        tls_ca: path of the certificates of the authorities that sign the members' ones.
        tls_plain: backends that may make connections without TLS, in lower case.
    """

    hang_timeout: float = 5.0
    busy_timeout: float = 60.0
    join_timeout: float = 30.0
    close_timeout: float = 5.0
    shim: str = "auto"
    require_patch: bool = False
    gloo_threads: int = 0
    lane: bool = True
    lane_collectives: bool = True
    check: bool = False
    early_close: bool = True
    host: str = ""
    ifname: str = ""
    stuck_after: float = 10.0
    reports: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_plain: frozenset[str] = frozenset()

    @property
    def tethers(self) -> bool:
        """`early_close` under its former name; deprecated."""
        warnings.warn("Settings.tethers is now called early_close", DeprecationWarning, stacklevel=2)
        return self.early_close


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from `environ` (default: the process's).

    Raises:
        MultiworldError: a variable's value is not what its rule says.
    """
    env = os.environ if environ is None else environ
    shim = env.get("M8D_SHIM", "auto").strip().lower() or "auto"
    if shim not in {"auto", "on", "off"}:
        raise MultiworldError(
            f"M8D_SHIM={env['M8D_SHIM']!r}",
            rule="It is one of auto, on, off",
            next_step="Set it, or unset it",
        )
    tls_cert, tls_key, tls_ca = _tls_files(env)
    p2p = env.get("M8D_LANE", "").strip().lower() == "p2p"
    return Settings(
        hang_timeout=_seconds(env, "M8D_HANG_TIMEOUT", Settings.hang_timeout, MIN_HANG_TIMEOUT),
        busy_timeout=_seconds(env, "M8D_BUSY_TIMEOUT", Settings.busy_timeout, 0.0),
        join_timeout=_seconds(env, "M8D_JOIN_TIMEOUT", Settings.join_timeout, 0.001),
        close_timeout=_seconds(env, "M8D_CLOSE_TIMEOUT", Settings.close_timeout, 0.0),
        reports=env.get("M8D_REPORTS", "").strip(),
        stuck_after=_seconds(env, "M8D_STUCK_AFTER", Settings.stuck_after, 0.0),
        early_close=_flag(env, _named(env, "M8D_EARLY_CLOSE"), default=Settings.early_close),
        lane=p2p or _flag(env, "M8D_LANE", default=Settings.lane, rule="It is 0, 1 or p2p"),
        lane_collectives=not p2p,
        check=_flag(env, "M8D_CHECK"),
        gloo_threads=_count(env, "M8D_GLOO_THREADS", Settings.gloo_threads, 64),
        shim=shim,
        host=env.get("M8D_HOST", "").strip(),
        ifname=env.get("M8D_IFNAME", "").strip(),
        require_patch=_flag(env, "M8D_REQUIRE_PATCH"),
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_ca=tls_ca,
        tls_plain=frozenset(_parts(env.get("M8D_TLS_PLAIN", "").lower())),
    )


def environment(name: str) -> str | None:
    """Return one variable of the process's environment; None where it is not set."""
    return os.environ.get(name)


def environment_with(*prefixes: str) -> dict[str, str]:
    """Return the variables of the process's environment whose names begin with one of `prefixes`."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


def run_id(environ: Mapping[str, str] | None = None) -> str:
    """Return the id of the run that this process belongs to; "" where it belongs to none.

    M8D_RUN_ID, or torchrun's, whose "none" is its default and means none. An empty M8D_RUN_ID means none,
    too.
    """
    env = os.environ if environ is None else environ
    if (ours := env.get("M8D_RUN_ID")) is not None:
        return ours.strip()
    theirs = env.get("TORCHELASTIC_RUN_ID", "").strip()
    return "" if theirs == "none" else theirs


def set_default_environment(values: Mapping[str, str]) -> dict[str, str]:
    """Set the variables that are not set yet, and return them; those set by the user stay."""
    fresh = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(fresh)
    return fresh


def set_environment(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set variables of this process, and unset those whose value is None.

    Returns:
        The previous values; passing them to this function restores them.
    """
    before = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return before


def _tls_files(env: Mapping[str, str]) -> list[str]:
    """Return the paths of certificate, key and authorities: all three, or "" three times."""
    names = ("M8D_TLS_CERT", "M8D_TLS_KEY", "M8D_TLS_CA")
    paths = [env.get(name, "").strip() for name in names]
    if any(paths) and not all(paths):
        told = ", ".join(f"{name}={path!r}" for name, path in zip(names, paths, strict=True))
        raise MultiworldError(
            told, rule="All three are set, or none", next_step="Set all three; see docs/security.md"
        )
    return paths


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _named(env: Mapping[str, str], name: str) -> str:
    """Return `name`, or its former name where only that is set."""
    former = _FORMER_NAMES[name]
    if env.get(name, "").strip() or not env.get(former, "").strip():
        return name
    _warn_of(former, name)
    return former


@functools.cache
def _warn_of(former: str, name: str) -> None:
    """Say once per process that a variable was renamed: in the log, and as a warning."""
    logging.getLogger(__name__).warning("the variable %s is deprecated; it is now called %s", former, name)
    warnings.warn(
        f"the variable {former} is deprecated; it is now called {name}", DeprecationWarning, stacklevel=2
    )


def _seconds(env: Mapping[str, str], name: str, default: float, least: float) -> float:
    text = env.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= MAX_TIMEOUT:
        raise MultiworldError(
            f"{name}={text!r}",
            rule=f"It is a number of seconds, at least {least} and at most {MAX_TIMEOUT:,.0f}",
            next_step="Set it, or unset it",
        )
    return value


def _count(env: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = env.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal() or int(text) > most:
        raise MultiworldError(
            f"{name}={text!r}",
            rule=f"It is a whole number from 0 to {most}",
            next_step="Set it, or unset it",
        )
    return int(text)


def _flag(env: Mapping[str, str], name: str, *, default: bool = False, rule: str = "It is 0 or 1") -> bool:
    text = env.get(name, "").strip().lower()
    if not text:
        return default
    if text not in {"0", "1", "false", "true", "no", "yes", "off", "on"}:
        raise MultiworldError(f"{name}={text!r}", rule=rule, next_step="Set it, or unset it")
    return text in {"1", "true", "yes", "on"}
