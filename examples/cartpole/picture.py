"""The picture of `rl_weights.py`: samples per second over time, with the kills; beside it one group, until its first kill."""

from __future__ import annotations

from dataclasses import dataclass

import _picture
from cartpole.policy import STEPS
from cartpole.trainer import TOGETHER

__all__ = ["Run", "draw"]


@dataclass
class Run:
    """What happened when, all in time.monotonic().

    Attributes:
        began: when the trainer was warm.
        ended: when it ended.
        steps: of the trainer.
        kills: of engines, by the moment of their lives.
    """

    began: float
    ended: float
    steps: list[float]
    kills: dict[str, list[float]]

    def rates(self) -> tuple[list[float], list[float]]:
        """Middles of all whole seconds, and samples per second in them."""
        middles, found = _picture.rates((at - self.began for at in self.steps), self.ended - self.began)
        return middles, [TOGETHER * STEPS * steps for steps in found]


def draw(file: str, worlds: Run, plain: Run) -> None:
    """Write the picture into `file`."""
    kills = sum(map(len, worlds.kills.values()))
    canvas, (above, below) = _picture.panels(
        f"One trainer, four engines, {kills} kills;\nbeside it one group of plain torch.distributed",
        2.2,
        0.8,
    )
    for at in (at for times in worlds.kills.values() for at in times):
        above.axvline(at - worlds.began, color=_picture.RED, linewidth=0.7, alpha=0.35)
    middles, rates = worlds.rates()
    above.plot(middles, rates, color=_picture.BLUE, label="a world for each engine")
    (killed,) = (at - plain.began for times in plain.kills.values() for at in times)
    over = plain.ended - plain.began
    before = [(at, rate) for at, rate in zip(*plain.rates(), strict=True) if at < killed]
    seconds, whole = ([*each] for each in zip(*before, strict=True))
    above.plot(
        [*seconds, killed, over], [*whole, whole[-1], 0.0], "--", color=_picture.ORANGE, label="one group"
    )
    above.plot(over, 0, "X", color=_picture.ORANGE, markersize=8, clip_on=False, zorder=5)
    above.annotate(
        "an engine killed: all ended",
        (over, 0),
        (8, 8),
        textcoords="offset points",
        color=_picture.ORANGE,
        bbox=_picture.BACK,
    )
    above.set_ylabel("samples per second")
    above.set_ylim(0, 1.35 * max(rates + whole))
    above.legend(loc="upper center", ncols=2)
    _picture.marks(
        below,
        {moment: [at - worlds.began for at in times] for moment, times in worlds.kills.items()},
    )
    below.set_xlabel("seconds; red: SIGKILL of an engine")
    below.set_xlim(0, worlds.ended - worlds.began)
    _picture.save(canvas, file)
