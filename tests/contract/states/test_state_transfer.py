"""A member's state, sent to another: what is carried, and what is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kits.contract.statekit import nothing_posted, same, soon, trained
from kits.contract.tensorkit import DTYPES, KINDS, bytes_of, filled
from kits.meetkit import PATIENCE

from multiworld._c10d.lane.state_transfer import receive_state
from multiworld.errors import StateError, StateTransferError

# -- what is carried -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_and_its_optimizer(lanes, pair, in_place):
    model, optimizer = trained()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 7,
        "rng": torch.get_rng_state(),
    }
    new, its = trained()
    with torch.no_grad():
        for each in new.parameters():
            each.zero_()
    into = {"model": new.state_dict(), "optimizer": its.state_dict()}
    got = lanes.carried(pair, state, into, in_place=in_place)
    assert same(got, {**state, "model": dict(state["model"])})
    assert list(got["optimizer"]["state"]) == [0, 1, 2, 3, 4, 5]
    assert torch.equal(new[0].weight, model[0].weight) is in_place
    its.load_state_dict(got["optimizer"])
    new.load_state_dict(got["model"])
    assert torch.equal(new[0].weight, model[0].weight)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("in_place", [False, True])
def test_tensors_of_every_kind(lanes, pair, name, in_place):
    sent, room = KINDS[name].sent(), KINDS[name].room()
    got = lanes.carried(pair, [sent], [room], in_place=in_place)[0]
    assert same(got, sent)
    apart = not any(size > 1 and not step for size, step in zip(room.shape, room.stride(), strict=True))
    if in_place and apart and sent.shape == room.shape and sent.dtype is room.dtype:
        assert got is room
    else:
        assert got is not room
        assert not got.requires_grad


@pytest.mark.parametrize("name", [each for each in DTYPES if not each.startswith("q")])
@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.filterwarnings("ignore:BComplex32:UserWarning")
def test_every_dtype(lanes, pair, name):
    sent, room = filled(name, 1), filled(name, 2)
    got = lanes.carried(pair, [sent, sent], [room], in_place=True)
    assert got[0] is room
    assert got[1].dtype is sent.dtype
    assert bytes_of(got[0]) == bytes_of(got[1]) == bytes_of(sent)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "complex64", "bool", "uint16", "int8"])
def test_every_dtype_out_of_order_in_parts(lanes, pair, small, name):
    """Every second row of 4096 rows, and of columns."""
    sent = filled(name, 1)[:12].expand(4096, 12).clone()
    into = [torch.empty_like(sent)[::2], torch.empty_like(sent).t()]
    got = lanes.carried(pair, [sent[::2], sent.t()], into, in_place=True)
    assert got[0] is into[0]
    assert got[1] is into[1]
    assert same(got, [sent[::2], sent.t()])


def test_tied_tensors_that_one_end_has_apart(lanes, pair):
    weight = torch.randn(10)
    got = lanes.carried(
        pair, {"a": weight, "b": weight}, {"a": torch.zeros(10), "b": torch.zeros(10)}, in_place=True
    )
    assert torch.equal(got["a"], weight)
    assert torch.equal(got["b"], weight)
    room = torch.zeros(10)
    got = lanes.carried(pair, {"a": weight, "b": 2 * weight}, {"a": room, "b": room}, in_place=True)
    assert torch.equal(got["a"], weight)
    assert torch.equal(got["b"], 2 * weight)
    assert got["b"].data_ptr() != room.data_ptr()


def test_only_tensors_of_the_same_form_are_received_into(lanes, pair):
    into = {
        "shape": torch.zeros(3),
        "dtype": torch.zeros(2).double(),
        "same": torch.zeros(2),
        "gone": torch.zeros(1),
    }
    state = {"shape": torch.ones(2), "dtype": torch.ones(2), "same": torch.ones(2), "new": torch.ones(1)}
    got = lanes.carried(pair, state, into, in_place=True)
    assert same(got, state)
    assert [key for key in into if torch.any(into[key])] == ["same"]


def test_a_survivors_own_state_stays_as_it_is(lanes, pair):
    into = {"a": torch.zeros(1000)}
    got = lanes.carried(pair, {"a": torch.ones(1000)}, into, in_place=False)
    assert torch.equal(got["a"], torch.ones(1000))
    assert not torch.any(into["a"])


@pytest.mark.parametrize("state", [{}, 7, None, torch.ones(3), [torch.empty(0)]], ids=repr)
def test_a_state_of_nearly_nothing(lanes, pair, state):
    assert same(lanes.carried(pair, state), state)


def test_many_parts_and_their_progress(lanes, pair, small):
    state = {"large": torch.randn(5, 3000), "many": [torch.tensor(float(each)) for each in range(600)]}
    total = 4 * 15_600
    gave, got = [], []
    sent = lanes.give(pair[0], state, progress=lambda *each: gave.append(each))
    back = receive_state(pair[1], 0, in_place=False, deadline=soon(), progress=lambda *each: got.append(each))
    sent.result(PATIENCE)
    assert same(back, state)
    assert gave == got
    assert len(got) > 10
    assert got[-1] == (total, total)
    assert sorted(got) == got
    assert all(nothing_posted(each) for each in pair)


def test_several_receivers_at_once_and_one_after_the_other(lanes, small):
    ends = lanes.connect(4)
    state = {"a": torch.randn(7000)}
    for _ in range(3):
        sent = [lanes.give(ends[0], state, receiver) for receiver in (1, 2, 3)]
        with ThreadPoolExecutor(3) as receivers:
            got = receivers.map(lambda end: receive_state(end, 0, in_place=False, deadline=soon()), ends[1:])
            assert all(same(each, state) for each in got)
        for each in sent:
            each.result(PATIENCE)


# -- what is not -----------------------------------------------------------------------------------------------


@pytest.fixture
def sharded():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    tensor = pytest.importorskip(
        "torch.distributed.tensor" if torch.__version__ >= "2.5" else "torch.distributed._tensor"
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield tensor.distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.ones(2, 2).to_sparse(), r"layout torch\.sparse_coo\. .*to_dense"),
        (lambda: torch.ones(2, device="meta"), r"meta device.*to_empty"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
            "quantized tensor.*dequantize",
        ),
        (lambda: print, r"a builtins\.builtin_function_or_method.*Leave it out"),
    ],
    ids=["sparse", "meta", "quantized", "function"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_what_is_refused_both_hear_of(lanes, pair, make, says):
    sent = lanes.give(pair[0], {"model": {"a.weight": make()}})
    with pytest.raises(StateTransferError, match=r"rank 0 gave up: StateError: model\.a\.weight is "):
        receive_state(pair[1], 0, in_place=False, deadline=soon())
    with pytest.raises(StateError, match=rf"^model\.a\.weight is .*{says}"):
        sent.result(PATIENCE)


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")  # torch 2.4's
def test_sharded_state_is_refused(lanes, pair, sharded):
    sent = lanes.give(pair[0], [sharded])
    with pytest.raises(StateTransferError):
        receive_state(pair[1], 0, in_place=False, deadline=soon())
    with pytest.raises(StateError, match=r"^0 is a DTensor: sharded state is not carried.*full_tensor"):
        sent.result(PATIENCE)


def test_a_tensor_whose_memory_was_released(lanes, pair):
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    sent = lanes.give(pair[0], [tensor])
    with pytest.raises(StateTransferError):
        receive_state(pair[1], 0, in_place=False, deadline=soon())
    with pytest.raises(StateError, match="released"):
        sent.result(PATIENCE)
