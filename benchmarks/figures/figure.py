"""A figure: one measured value with its spread, goal and baseline. Pure: no torch, no clock."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


FEW = 4
"""Quartiles of fewer samples are no spread."""
UNKNOWN = 0.10
"""What is taken for the spread then: a tenth of the value on either side."""
TAIL = 100
"""A 99th percentile of fewer samples is near the largest of them, and says nothing of later ones."""


@dataclass(frozen=True)
class Goal:
    """A limit and its direction; exactly one of the two is given.

    Raises:
        ValueError: none or both were given.
    """

    at_most: float | None = None
    at_least: float | None = None

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError(f"{self.at_most=}, {self.at_least=}: a goal has one limit; give one of them")

    @property
    def limit(self) -> float:
        """Whichever was given."""
        limit = self.at_least if self.at_most is None else self.at_most
        assert limit is not None  # noqa: S101  (for mypy; held by __post_init__)
        return limit

    def met(self, value: float) -> bool:
        """Whether a value reaches the goal; the limit itself does."""
        return value <= self.limit if self.at_most is not None else value >= self.limit

    def __str__(self) -> str:
        return f"{'≤' if self.at_most is not None else '≥'} {self.limit:.3g}"


@dataclass(frozen=True)
class Figure:
    """One line of a benchmark's table.

    Attributes:
        part: the part that measured it: "latency".
        name: unique in its part and stable between versions: "send_recv/4B/2/world".
        value: in `unit`; for ratios the median over rounds of ours/stock of the same round.
        unit: "ratio", "us", "ms", "GB/s", "1/s", "MB", "threads", "%", ...
        low: first quartile over rounds or samples, in `unit`.
        high: third quartile.
        samples: how many rounds or samples are behind it.
        goal: for `value`, if there is one.
        note: what it is, for a reader of the table; "" where the name says it.
        baseline: what stock took, in `absolute_unit`.
        absolute: what ours took, in `absolute_unit`.
        absolute_unit: of `baseline` and `absolute`.
        quantiles: "p50", "p99", "max" in `unit`, where a distribution was measured.
        series: further data for pictures; JSON's types only.

    Raises:
        ValueError: a number is not finite, or a name is empty.
    """

    part: str
    name: str
    value: float
    unit: str
    low: float
    high: float
    samples: int
    goal: Goal | None = None
    note: str = ""
    baseline: float | None = None
    absolute: float | None = None
    absolute_unit: str = ""
    quantiles: dict[str, float] = field(default_factory=dict)
    series: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.part or not self.name:
            raise ValueError(f"{self.part!r}, {self.name!r}: a figure has a part and a name")
        numbers = (self.value, self.low, self.high, self.baseline, self.absolute, *self.quantiles.values())
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise ValueError(f"{self.part}/{self.name} = {numbers}: every number of a figure is finite")

    @property
    def key(self) -> str:
        """Its name among all parts: "latency/send_recv/4B/2/world"."""
        return f"{self.part}/{self.name}"

    @property
    def met(self) -> bool | None:
        """Whether its goal is met; None without one."""
        return None if self.goal is None else self.goal.met(self.value)

    @property
    def unsure(self) -> bool:
        """Whether its goal's limit lies within the error of its median: another run may say otherwise.

        95 %: 1.96 standard errors of a median, each 1.25 IQR / (1.35 √n); McGill, Tukey, Larsen, "Variations
        of Box Plots", The American Statistician 32 (1978). Of fewer than `FEW` samples `UNKNOWN` at least.
        Where the value is the 99th percentile: whether the limit lies from `low` to `high`, which are the
        95th percentile and the largest; always with fewer than `TAIL` samples.
        """
        if self.goal is None:
            return False
        if self.quantiles.get("p99") == self.value:
            return self.samples < TAIL or self.low <= self.goal.limit <= self.high
        error = 1.81 * (self.high - self.low) / math.sqrt(self.samples)
        if self.samples < FEW:
            error = max(error, UNKNOWN * abs(self.value))
        return abs(self.goal.limit - self.value) < error

    @property
    def tail(self) -> dict[str, float]:
        """What is shown of `quantiles`: "max", and "p99" where enough was measured for one."""
        # `distribution` is of the samples; without a "p90" each sample stands for many operations.
        few = self.samples < TAIL and "p90" in self.quantiles
        names = ("max",) if few else ("p99", "max")
        return {name: self.quantiles[name] for name in names if name in self.quantiles}


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0 to 1), linear between neighbours: what numpy and R (type 7) give by default.

    Raises:
        ValueError: no values, or q outside 0 to 1.
    """
    if not values or not 0.0 <= q <= 1.0:
        raise ValueError(f"quantile {q} of {len(values)} values: give values, and q from 0 to 1")
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below = int(place)
    if below + 1 == len(ordered):
        return ordered[below]
    # Weighted like this, neighbours that are equal give exactly their value.
    return ordered[below] + (ordered[below + 1] - ordered[below]) * (place - below)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile.

    Raises:
        ValueError: no values.
    """
    return quantile(values, 0.25), quantile(values, 0.5), quantile(values, 0.75)


def ratio(part: str, name: str, ours: Sequence[float], stock: Sequence[float], **more: Any) -> Figure:
    """Ours/stock, round by round: the median of the ratios, with their quartiles; medians of both beside it.

    Args:
        part: see `Figure`.
        name: see `Figure`.
        ours: a value for each round.
        stock: the value of the same round; more than 0.
        more: further fields of `Figure` (`goal`, `note`, `absolute_unit`, `quantiles`, `series`).

    Raises:
        ValueError: no rounds, not as many on both sides, or a stock value that is not above 0.
    """
    if len(ours) != len(stock) or not ours:
        raise ValueError(f"{part}/{name}: {len(ours)} and {len(stock)} rounds: each round has one of both")
    if min(stock) <= 0:
        raise ValueError(f"{part}/{name}: stock's {min(stock)} is no divisor: time more in a round")
    low, middle, high = quartiles([mine / theirs for mine, theirs in zip(ours, stock, strict=True)])
    fields: dict[str, Any] = {
        "unit": "ratio",
        "baseline": quantile(stock, 0.5),
        "absolute": quantile(ours, 0.5),
        **more,
    }
    return Figure(part=part, name=name, value=middle, low=low, high=high, samples=len(ours), **fields)


def summary(part: str, name: str, values: Sequence[float], unit: str, **more: Any) -> Figure:
    """The median of samples, with their quartiles.

    Args:
        part: see `Figure`.
        name: see `Figure`.
        values: the samples, in `unit`.
        unit: see `Figure`.
        more: further fields of `Figure`.

    Raises:
        ValueError: no values.
    """
    low, middle, high = quartiles(values)
    return Figure(part, name, middle, unit, low, high, len(values), **more)


def distribution(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 and max, for `Figure.quantiles`.

    Raises:
        ValueError: no values.
    """
    return {
        "p50": quantile(values, 0.5),
        "p90": quantile(values, 0.9),
        "p99": quantile(values, 0.99),
        "max": max(values),
    }


def to_json(figure: Figure) -> dict[str, Any]:
    """JSON's types; what is at its default is left out."""
    found: dict[str, Any] = {}
    for each in dataclasses.fields(figure):
        value = getattr(figure, each.name)
        if each.name == "goal" and value is not None:
            value = {k: v for k, v in dataclasses.asdict(value).items() if v is not None}
        elif value in ("", None, {}):
            continue
        found[each.name] = value
    return found


def from_json(data: Mapping[str, Any]) -> Figure:
    """What `to_json` made.

    Raises:
        ValueError: it is no figure: a field is missing, unknown, or not finite.
    """
    fields = dict(data)
    try:
        if goal := fields.pop("goal", None):
            fields["goal"] = Goal(**goal)
        return Figure(**fields)
    except TypeError as error:
        raise ValueError(f"{data.get('name', data)}: not a figure of this version: {error}") from error
