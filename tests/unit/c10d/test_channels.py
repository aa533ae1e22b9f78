"""A process group's channel in the lane of its world."""

from __future__ import annotations

import datetime as dt
import types

import pytest

torch = pytest.importorskip("torch")

from multiworld._c10d.lane.p2p_dispatch import Channels  # noqa: E402  (torch may be missing)


class Log:
    """Of the world's operations."""

    def group(self, number, ranks):
        assert number
        assert ranks == (0, 1)


class Group:
    """A process group of gloo."""

    _device_types = (torch.device("cpu"),)

    def __init__(self, timeout):
        self._timeout = timeout

    def rank(self):
        return 0

    def _get_backend(self, device):
        assert device == torch.device("cpu")
        return types.SimpleNamespace(options=types.SimpleNamespace(_timeout=self._timeout))


class State:
    """Of the world, which knows one group beside its own."""

    def __init__(self, group):
        self.group, self.pg_coalesce_state = object(), {}
        self.pg_backend_config, self.pg_names = {group: "cpu:gloo"}, {group: "w/1"}
        self.pg_group_ranks = {group: {0: 0, 1: 1}}


@pytest.mark.parametrize("timeout", [dt.timedelta(seconds=7), dt.timedelta(minutes=30)])
def test_a_groups_messages_have_the_timeout_that_it_was_given(timeout):
    """Also where that is torch's default: a group that was given none has the world's."""
    state = State(group := Group(timeout))
    channels = Channels(types.SimpleNamespace(log=Log()), state)
    assert channels.of(group).timeout == timeout.total_seconds()
