"""Two programs at one store, with the same names of worlds."""

from __future__ import annotations

import os

import pytest
import torch
from kits.contract.worldkit import SOON

import multiworld as mw


def member(me, environ, value, timeout=4 * SOON):
    os.environ.update(environ)
    try:
        w = mw.join("w1", me.rank, 2, store=me.store, timeout=timeout)
    except mw.JoinError as error:
        me.emit("refused", kind=type(error).__name__, text=str(error))
        return
    t = torch.tensor([value])
    w.all_reduce(t)
    me.emit("joined", value=t.item(), generation=w.generation)
    me.hear()
    w.close()


@pytest.mark.parametrize("variable", ["M8D_RUN_ID", "TORCHELASTIC_RUN_ID"])
def test_programs_with_different_ids_do_not_mix(cast, variable):
    programs = [{variable: "first"}, {variable: "second"}, {}]
    members = [
        cast.start(member, rank, environ=environ, value=10**number)
        for rank in range(2)
        for number, environ in enumerate(programs)
    ]
    for number, each in enumerate(members):
        seen = each.expect("joined")
        assert (seen.value, seen.generation) == (2 * 10 ** (number % 3), 1)
    for each in members:
        each.say("close")
    assert [each.finish() for each in members] == [0] * len(members)


def test_a_member_with_an_id_and_one_without_miss_each_other(cast):
    members = [
        cast.start(member, rank, environ={"M8D_RUN_ID": "mine"} if rank else {}, value=1, timeout=2.0)
        for rank in range(2)
    ]
    for rank, each in enumerate(members):
        seen = each.expect("refused")
        assert seen.kind == "JoinTimeoutError"
        assert f"missing: rank {1 - rank}" in seen.text
        assert ("only members of run 'mine'" in seen.text) == bool(rank)
    assert [each.finish() for each in members] == [0, 0]
