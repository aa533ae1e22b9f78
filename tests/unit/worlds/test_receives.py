"""Which of several receives has the next message: decided without torch, with tensors that are names."""

from __future__ import annotations

import threading

import pytest

from multiworld._generation.parked_receives import Parked, ParkedReceives


class Tensor:
    """As much of a tensor as a parked receive asks for."""

    nbytes, dtype, shape = 4, "f", (1,)

    def __init__(self, value=None, nbytes=4):
        self.value, self.nbytes = value, nbytes

    def is_contiguous(self):
        return True

    def view_as(self, other):
        return self

    def copy_(self, other):
        self.value = other.value

    def new_empty(self, shape):
        return Tensor()


class Work:
    def __init__(self):
        self.arrived, self.source = threading.Event(), None

    def wait(self):
        assert self.arrived.wait(30)

    def _source_rank(self):
        return self.source


class Gloo:
    """Posts receives, and lets messages arrive."""

    def __init__(self):
        self.posted = []
        self.receives = ParkedReceives(lambda job: threading.Thread(target=job, daemon=True).start())

    def post(self, tensor):
        self.posted.append((work := Work(), tensor))
        return work

    def arrive(self, index, value, source):
        work, tensor = self.posted[index]
        tensor.value, work.source = value, source
        work.arrived.set()

    def claim(self, src, tensor):
        return self.receives.claim(src, 0, tensor, self.post)

    def park(self, src, *, source=-1):
        parked = Parked(Tensor(), None, 30.0, source=source)
        self.receives.park(src, 0, parked)
        return parked


def settle(parked, value, source):
    parked.tensor.value, parked.source = value, source
    parked.settle(None)


@pytest.fixture
def gloo():
    return Gloo()


def test_what_concerns_no_parked_receive_is_posted_as_ever(gloo):
    gloo.park(1, source=1)
    assert gloo.claim(2, Tensor()) is None
    assert gloo.receives.claim(1, 7, Tensor(), gloo.post) is None
    assert gloo.receives.waiting


def test_the_same_source_goes_in_order(gloo):
    first, second = gloo.park(1, source=1), gloo.park(1, source=1)
    settle(second, "b", 1)
    settle(first, "a", 1)
    got = []
    for _ in range(2):
        gloo.claim(1, tensor := Tensor()).wait()
        got.append(tensor.value)
    assert got == ["a", "b"]
    assert not gloo.receives.waiting
    assert gloo.posted == []


def test_any_source_takes_another_members_message_and_leaves_the_parked_one(gloo):
    parked = gloo.park(1, source=1)
    work = gloo.claim(None, tensor := Tensor())
    gloo.arrive(0, "from 2", 2)
    work.wait()
    assert (tensor.value, work.source_rank()) == ("from 2", 2)
    settle(parked, "from 1", 1)
    gloo.claim(1, tensor := Tensor()).wait()
    assert tensor.value == "from 1"


def test_any_source_takes_the_parked_message_first_and_keeps_its_own_receive(gloo):
    parked = gloo.park(1, source=1)
    work = gloo.claim(None, tensor := Tensor())
    settle(parked, "first", 1)
    work.wait()
    assert (tensor.value, work.source_rank()) == ("first", 1)
    assert gloo.receives.waiting  # the one of any source is posted, and waits
    again = gloo.claim(None, tensor := Tensor())
    assert len(gloo.posted) == 1
    gloo.arrive(0, "second", 1)
    again.wait()
    assert tensor.value == "second"


def test_one_source_waits_for_parked_receives_of_any_source(gloo):
    parked = gloo.park(None)
    work = gloo.claim(1, tensor := Tensor())
    assert gloo.posted == []
    settle(parked, "mine", 1)
    work.wait()
    assert tensor.value == "mine"


def test_one_source_posts_its_own_when_the_others_got_messages_of_other_members(gloo):
    parked = gloo.park(None)
    work = gloo.claim(1, tensor := Tensor())
    done = threading.Thread(target=work.wait, daemon=True)
    done.start()
    settle(parked, "not mine", 2)
    while not gloo.posted:
        threading.Event().wait(0.001)
    gloo.arrive(0, "mine", 1)
    done.join(30)
    assert tensor.value == "mine"
    gloo.claim(2, other := Tensor()).wait()
    assert other.value == "not mine"


def test_a_message_that_does_not_fit_is_kept(gloo):
    settle(gloo.park(1, source=1), "a", 1)
    with pytest.raises(ValueError, match="cancelled receive of 4 bytes"):
        gloo.claim(1, Tensor(nbytes=8))
    gloo.claim(1, tensor := Tensor()).wait()
    assert tensor.value == "a"


def test_a_receive_that_failed_raises(gloo):
    parked = gloo.park(1, source=1)
    work = gloo.claim(1, Tensor())
    parked.settle(RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        work.wait()


def test_failing_to_post_gives_everything_back(gloo):
    gloo.park(1, source=1)

    def refuse(tensor):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        gloo.receives.claim(None, 0, Tensor(), refuse)
    assert gloo.receives.waiting
