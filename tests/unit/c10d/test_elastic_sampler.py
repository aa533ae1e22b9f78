"""The batch sampler of members that come and go; they are values, and the world is played."""

from __future__ import annotations

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kits.samplekit import AsWorld, Stage  # noqa: E402  (torch may be missing)

from multiworld.elastic import ElasticBatchSampler  # noqa: E402

MOST = 5
"""Members."""
SOME = st.sets(st.integers(0, MOST - 1))
EVENTS = st.one_of(
    st.tuples(st.just("steps"), st.integers(1, 12)),
    st.tuples(st.just("advance"), st.integers(0, 3), st.integers(0, 3)),  # so many leave, and come
    st.tuples(st.just("break"), SOME, SOME, st.integers(0, 2), st.lists(SOME, max_size=2)),
)
"""Of a breakage: who is lost, who has ended the step, how many come, who is lost before each try that fails."""
OPTIONS = st.fixed_dictionaries(
    {"per_member": st.booleans(), "shuffle": st.booleans(), "drop_last": st.booleans()}
)


@given(st.integers(1, 40), st.integers(MOST, 9), OPTIONS, st.integers(0, 4), st.lists(EVENTS, max_size=20))
def test_every_sample_once_in_an_epoch_whoever_comes_and_goes(length, batch, options, ahead, events):
    if options["drop_last"]:
        length += MOST * batch  # one step at least, of however many members
    stage = Stage(lambda: ElasticBatchSampler(length, batch, seed=3, **options), 2, ahead)
    most = batch * (MOST if options["per_member"] else 1)
    for name, *what in events:
        members = stage.members
        if name == "steps":
            for _ in range(*what):
                stage.step()
        elif name == "advance":
            leave, come = what
            stage.step()
            rest = max(1, len(members) - leave)
            stage.change(lost=members[rest:], come=min(come, MOST - rest))
        else:
            lost, ended, come, tries = what
            stage.step(ended=ended)
            for gone in tries:
                stage.fail(some(stage.members, gone))
            lost = some(stage.members, lost)
            stage.change(lost=lost, come=min(come, MOST - len(stage.members) + len(lost)))
        learned = stage.members[0].learned
        assert all(each.learned == learned for each in stage.members)
        epochs = {each.sampler.epoch for each in stage.members}
        assert len(epochs) == 1
        for epoch in range(max(epochs)):
            times = [learned[epoch, each] for each in range(length)]
            if options["drop_last"]:
                assert set(times) <= {0, 1}
                assert sum(times) > length - most
            else:  # filled up from the beginning
                assert min(times) >= 1
                assert max(times) - min(times) <= 1
                assert sum(times) < length + most
            if not options["shuffle"]:
                assert times == sorted(times, reverse=True)


def some(members, ranks):
    """Return those of these ranks, but for one of all."""
    return [members[rank] for rank in ranks if rank < len(members)][: len(members) - 1]


def test_a_step_that_only_others_have_made_is_not_taken_for_made():
    sampler, world = ElasticBatchSampler(20, 4), AsWorld(1, 1, 2, 0)
    sampler.follow(world)
    list(sampler)
    world.step = 4
    before = {"epoch": 0, "taken": 16}
    assert sampler.state_dict() == before
    world.step, world.behind = 5, 4  # the next generation has agreed, and the state has not come
    assert sampler.state_dict() == before
    world.step, world.behind = 4, None  # the member that had made the step was lost
    assert sampler.state_dict() == before


def test_members_that_make_a_step_larger_than_an_epoch_are_told_so():
    """Without an error the program would go through epochs without steps for ever."""
    sampler, world = ElasticBatchSampler(100, 40, per_member=True, drop_last=True), AsWorld(1, 0, 2, 0)
    sampler.follow(world)
    assert [len(batch) for batch in sampler] == [40]
    world.step = 1
    world.generation, world.world_size = 2, 3
    for ask in (iter, len):
        with pytest.raises(
            ValueError, match="length=100, batch_size=120, drop_last=True: an epoch has one step"
        ):
            ask(sampler)
    assert sampler.state_dict() == {"epoch": 0, "taken": 80}
    world.generation, world.world_size = 3, 2
    assert (len(sampler), len(list(sampler)), sampler.epoch) == (1, 1, 1)


def test_a_count_that_begins_anew_moves_nothing():
    sampler, world = ElasticBatchSampler(20, 4), AsWorld(1, 0, 1, 0)
    sampler.follow(world)
    next(iter(sampler))
    world.step = 1
    assert sampler.state_dict() == {"epoch": 0, "taken": 4}
    world.step = 0
    assert sampler.state_dict() == {"epoch": 0, "taken": 4}
    next(iter(sampler))
    world.step = 1
    assert sampler.state_dict() == {"epoch": 0, "taken": 8}


def test_a_step_has_the_same_samples_whoever_takes_them():
    def steps(members):
        stage = Stage(lambda: ElasticBatchSampler(50, 8, seed=1), members)
        return [sorted(each for one in take(stage) for each in one) for _ in range(20)]

    def take(stage):
        shares = [each.begin_step()[1] for each in stage.members]
        for each in stage.members:
            each.end_step([])
        return shares

    assert steps(1) == steps(3) == steps(8)


def test_each_epoch_has_an_order_of_its_own():
    sampler = ElasticBatchSampler(100, 100, seed=5)
    world = AsWorld(1, 0, 1, 0)
    sampler.follow(world)
    orders = []
    for _ in range(3):
        orders += list(sampler)
        world.step += 1
    assert sampler.epoch == 3
    assert all(sorted(each) == list(range(100)) for each in orders)
    assert len({tuple(each) for each in orders}) == 3
    again = ElasticBatchSampler(100, 100, seed=5)
    again.follow(AsWorld(7, 0, 1, 99))
    again.load_state_dict({"epoch": 1, "taken": 0})
    assert list(again) == [orders[1]]


def test_what_it_says_of_itself():
    sampler = ElasticBatchSampler(10, 4, shuffle=False)
    assert sampler.epoch == 0
    with pytest.raises(RuntimeError, match="follows no world yet"):
        iter(sampler)
    world = AsWorld(1, 1, 2, 0)
    sampler.follow(world)
    assert (sampler.batch_size, len(sampler)) == (4, 3)
    assert list(sampler) == [[2, 3], [6, 7], [0, 1]]
    world.step = 2
    assert (sampler.state_dict(), len(sampler)) == ({"epoch": 0, "taken": 8}, 1)
    world.step = 3
    assert (sampler.state_dict(), len(sampler)) == ({"epoch": 1, "taken": 0}, 3)
    of_each = ElasticBatchSampler(10, 4, per_member=True)
    of_each.follow(world)
    assert (of_each.batch_size, len(of_each)) == (8, 2)


@pytest.mark.parametrize("begins", [False, True])
def test_members_that_shrink_again_before_a_step_go_on_in_one_epoch(begins):
    """Three have no step left where two have one: of them, one comes with the state, and one may have begun."""

    def sampler():
        return ElasticBatchSampler(100, 2, per_member=True, drop_last=True)

    worlds = AsWorld(1, 0, 2, 0), AsWorld(2, 2, 3, 24)
    stays, comes = sampler(), sampler()
    stays.follow(worlds[0])
    batches = iter(stays)
    for _ in range(24):
        next(batches)
    worlds[0].step, worlds[0].generation, worlds[0].world_size = 24, 2, 3
    comes.load_state_dict(stays.state_dict())
    comes.follow(worlds[1])
    if begins:
        next(iter(comes))
    for rank, world in enumerate(worlds):
        world.generation, world.rank, world.world_size = 3, rank, 2
    assert [each.epoch for each in (stays, comes)] == [0, 0]
    assert not set(next(iter(stays))) & set(next(iter(comes)))


def test_an_iterator_of_another_generation_is_refused():
    sampler, world = ElasticBatchSampler(10, 2), AsWorld(1, 0, 2, 0)
    sampler.follow(world)
    batches = iter(sampler)
    next(batches)
    world.generation, world.world_size = 2, 1
    with pytest.raises(RuntimeError, match="Begin a new one in each generation"):
        next(batches)
    stale = iter(sampler)
    sampler.load_state_dict({"epoch": 0, "taken": 4})
    with pytest.raises(RuntimeError, match="and where a state was loaded"):
        next(stale)


def test_more_advances_than_batches_are_noticed():
    sampler, world = ElasticBatchSampler(10, 2), AsWorld(1, 0, 1, 5)
    sampler.follow(world)
    next(iter(sampler))
    world.step += 2
    with pytest.raises(RuntimeError, match="advanced 2 times, and 1 batches were taken"):
        sampler.state_dict()


def test_an_order_is_the_same_whatever_the_default_device_is():
    sampler = ElasticBatchSampler(10, 2)
    sampler.follow(AsWorld(1, 0, 1, 0))
    batches = list(sampler)
    with torch.device("meta"):
        assert list(sampler) == batches


def test_bad_sizes():
    for bad in ({"length": 0, "batch_size": 1}, {"length": 1, "batch_size": 0}):
        with pytest.raises(ValueError, match="an epoch has one step at least"):
            ElasticBatchSampler(**bad)
    with pytest.raises(ValueError, match="an epoch has one step at least"):
        ElasticBatchSampler(3, 4, drop_last=True)
    sampler = ElasticBatchSampler(10, 2)
    sampler.follow(AsWorld(1, 0, 3, 0))
    with pytest.raises(ValueError, match="batch_size=2 for 3 members"):
        iter(sampler)


def test_what_stands_for_a_world_has_a_step_and_no_more():
    """As where one process makes the same steps alone."""
    alone = types.SimpleNamespace(generation=1, rank=0, world_size=1, step=0)
    sampler = ElasticBatchSampler(8, 4, shuffle=False)
    sampler.follow(alone)
    assert list(sampler) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    alone.step = 1
    assert sampler.state_dict() == {"epoch": 0, "taken": 4}
