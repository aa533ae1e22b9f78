"""Order and timing of rounds: forms interleaved and rotating, warm-up rounds dropped."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Form = TypeVar("Form")
Value = TypeVar("Value")


def order(forms: Sequence[Form], number: int) -> list[Form]:
    """The forms in the order of round `number`: each stands in each place equally often."""
    first = number % len(forms) if forms else 0
    return [*forms[first:], *forms[:first]]


def interleaved(
    forms: Sequence[Form], rounds: int, measure: Callable[[Form], Value], warm_up: int = 2
) -> dict[Form, list[Value]]:
    """Measure every form once in each round; the values of round n stand at index n for every form.

    Args:
        forms: what is compared.
        rounds: those that count.
        measure: one round of one form.
        warm_up: further rounds before them, measured and dropped.
    """
    values: dict[Form, list[Value]] = {form: [] for form in forms}
    for number in range(warm_up + rounds):
        for form in order(forms, number):
            value = measure(form)
            if number >= warm_up:
                values[form].append(value)
    return values


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection inside; what lives already is not looked at afterwards either."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
