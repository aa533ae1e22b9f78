"""Every form of every operation, held to the table: signatures, docstrings, values, errors, and the way it goes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import multiworld as mw
from multiworld.aio import Aio
from multiworld.communicator import WorldCommunicator
from multiworld.operation_table import TABLE

WITHIN = 60.0
NEWER = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
COMMUNICATED = ("send", "recv", "broadcast", "all_reduce", "reduce", "all_gather", "gather", "scatter")
DIRECT = (
    "broadcast", "reduce", "all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier",
)  # fmt: skip
COMPLETED = [
    name for name, row in TABLE.items() if "object" not in name and not name.startswith(("i", "batch"))
]
"""Those that are over when they return; `isend` and its like begin what they do."""


def of_torch(name):
    return getattr(dist, NEWER.get(name, name), None) or getattr(dist, name)


# -- what is declared -------------------------------------------------------------------------------------------


def declared(method, *, without=()):
    """A method's parameters as the table writes them."""
    found, keyword_only = [], False
    for each in list(inspect.signature(method).parameters.values())[1:]:
        if each.name in without:
            continue
        if each.kind is each.KEYWORD_ONLY and not keyword_only:
            found.append("*")
            keyword_only = True
        found.append(each.name if each.default is each.empty else f"{each.name}={each.default!r}")
    return ", ".join(found)


def public(owner):
    return {
        name for name, value in vars(owner).items() if inspect.isfunction(value) and not name.startswith("_")
    }


def test_each_form_has_the_tables_operations_and_no_more():
    of_world = [each for each in mw.World.__mro__ if each.__name__ in {"Collectives", "ObjectCollectives"}]
    assert set().union(*map(public, of_world)) == set(TABLE)
    assert public(Aio) == set(TABLE)
    assert public(WorldCommunicator) & set(TABLE) == set(COMMUNICATED)
    assert tuple(name for name, row in TABLE.items() if row.post is not None) == DIRECT


def test_the_page_for_those_who_come_from_torch_names_them_all():
    page = (Path(__file__).parents[3] / "docs" / "from-torch-distributed.md").read_text()
    assert [name for name in TABLE if f"`{name}`" not in page] == []


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_signatures_are_the_tables_and_docstrings_begin_alike(row):
    world, awaitable = getattr(mw.World, row.name), getattr(Aio, row.name)
    assert declared(world, without=("async_op",)) == row.parameters
    assert declared(awaitable) == row.parameters
    assert inspect.iscoroutinefunction(awaitable)
    words = re.split(r" ?[.;(]", awaitable.__doc__)[0]
    assert world.__doc__.startswith(words)
    if row.name in COMMUNICATED:
        named = getattr(WorldCommunicator, row.name)
        assert named.__doc__.startswith(words.replace("tensor_list", "tensors"))
        # pymultiworld's: no tags, each receive has a source, and the tensors of all are called otherwise.
        rest = declared(named, without=("world_name",)).replace("tensors", "tensor_list")
        assert rest == row.parameters.replace(", tag=0", "").replace("src=None", "src")


@pytest.mark.parametrize("row", TABLE.values(), ids=lambda row: row.name)
def test_torchs_functions_take_the_same_in_that_order(row):
    """What the table passes by position, torch has at that position."""
    taken = list(inspect.signature(dist.__dict__[row.name]).parameters)
    mine = [each for each in row.names if each not in {"tag", "device", "*", "weights_only"}]
    if row.by_name:
        assert set(mine) <= set(taken)
    else:
        assert taken[: len(mine)] == mine


# -- what comes out ---------------------------------------------------------------------------------------------


def cases(rank, size):
    """For each operation: makes its arguments, and tells what must be in them afterwards."""
    part, whole = float(rank + 1), torch.arange(float(size)) + 10 * rank
    sums, peer = float(sum(range(1, size + 1))), 1 - rank

    def lists():
        return [torch.zeros(1) for _ in range(size)]

    def tensor():
        return torch.tensor([part])

    column = sum(torch.arange(float(size)) + 10 * other for other in range(size))
    row_of = torch.tensor([10.0 * other + rank for other in range(size)])
    at_root = rank == 0
    return {
        "broadcast": (lambda: (tensor(), 0), lambda a: a[0].item() == 1.0),
        "reduce": (lambda: (tensor(), 0), lambda a: not at_root or a[0].item() == sums),
        "all_reduce": (lambda: (tensor(),), lambda a: a[0].item() == sums),
        "gather": (
            lambda: (tensor(), lists() if at_root else None, 0),
            lambda a: not at_root or [each.item() for each in a[1]] == [1.0, 2.0],
        ),
        "scatter": (
            lambda: (tensor(), [torch.tensor([7.0 + i]) for i in range(size)] if at_root else None, 0),
            lambda a: a[0].item() == 7.0 + rank,
        ),
        "all_gather": (lambda: (lists(), tensor()), lambda a: [each.item() for each in a[0]] == [1.0, 2.0]),
        "all_gather_into_tensor": (
            lambda: (torch.zeros(size), tensor()),
            lambda a: a[0].tolist() == [1.0, 2.0],
        ),
        "reduce_scatter": (
            lambda: (torch.zeros(1), list(whole.clone().split(1))),
            lambda a: a[0].item() == column[rank],
        ),
        "reduce_scatter_tensor": (
            lambda: (torch.zeros(1), whole.clone()),
            lambda a: a[0].item() == column[rank],
        ),
        "all_to_all": (
            lambda: (lists(), list(whole.clone().split(1))),
            lambda a: torch.equal(torch.cat(a[0]), row_of),
        ),
        "all_to_all_single": (
            lambda: (torch.zeros(size), whole.clone()),
            lambda a: torch.equal(a[0], row_of),
        ),
        "barrier": (tuple, lambda _: True),
        "send": (lambda: (tensor(), peer), lambda _: True),
        "recv": (lambda: (torch.zeros(1), peer), lambda a: a[0].item() == peer + 1.0),
    }


def forms_of(world, communicator, name, loop):
    """The forms of an operation, each a function of its arguments that returns when it is done."""
    found = {
        "blocking": getattr(world, name),
        "aio": lambda *args: loop.run_until_complete(getattr(world.aio, name)(*args)),
    }
    if name in COMMUNICATED:
        named = getattr(communicator, name)
        found["communicator"] = lambda *args: loop.run_until_complete(named(*args, world_name=world.name))
    if name not in {"send", "recv"}:

        def later(*args):
            work = getattr(world, name)(*args, async_op=True)
            if work is not None:  # a member that takes no part, in some versions
                work.wait()

        found["async_op"] = later

    def inside(*args):
        with world:
            of_torch(name)(*args)

    found["block"] = inside
    return found


@contextlib.contextmanager
def a_loop():
    loop = asyncio.new_event_loop()
    try:
        yield loop
    finally:
        loop.close()


def every_form(me, size):
    world = mw.join("table", me.rank, size, store=me.store, timeout=WITHIN)
    communicator = WorldCommunicator()
    communicator.set_world(world.name, world)
    done = []
    with a_loop() as loop, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, of names
        given = cases(me.rank, size)
        for name, (make, right) in given.items():
            if name == "recv":
                continue
            for form, run in forms_of(world, communicator, name, loop).items():
                args = make()
                if name == "send":  # and the other one receives, by the same form; then the other way round
                    receive = forms_of(world, communicator, "recv", loop)[form]
                    into = given["recv"][0]()
                    for sends in (me.rank == 0, me.rank == 1):
                        (run if sends else receive)(*(args if sends else into))
                    assert given["recv"][1](into), (form, into)
                else:
                    run(*args)
                assert right(args), (name, form, args)
                done.append((name, form))
    assert world.state is mw.State.ACTIVE
    world.barrier()
    me.emit("done", done=done, closed=world.close())


def test_every_form_gives_the_same_values(cast):
    members = cast.all(every_form, 2)
    for member in members:
        seen = member.expect("done")
        assert seen.closed
        assert {name for name, _ in seen.done} | {"recv"} == set(COMPLETED)
    assert [member.finish() for member in members] == [0, 0]


# -- the way ----------------------------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path):
    with contextlib.closing(mw.join("table", 0, 1, store=f"file://{tmp_path}/store", timeout=WITHIN)) as made:
        yield made
        assert made.state is mw.State.ACTIVE


@pytest.fixture
def communicator(world):
    made = WorldCommunicator()
    made.set_world(world.name, world)
    return made


@pytest.mark.parametrize("name", DIRECT)
def test_plain_tensors_pass_by_torchs_function_in_every_form(world, communicator, name, monkeypatch):
    make, _ = cases(0, 1)[name]
    gone = []

    def refuse(*_args, **_kwargs):
        gone.append(name)
        raise AssertionError(f"{name} went through torch.distributed")

    for each in {name, NEWER.get(name, name)} & set(vars(dist)):
        monkeypatch.setattr(dist, each, refuse)
    with a_loop() as loop:
        for form, run in forms_of(world, communicator, name, loop).items():
            args = make()
            if form in {"async_op", "block"}:
                with pytest.raises(AssertionError, match="went through"):
                    run(*args)
            else:
                run(*args)
    assert len(gone) == 2


@pytest.mark.parametrize("form", ["blocking", "aio"])
def test_what_was_posted_is_waited_for_though_the_world_ends_meanwhile(world, communicator, form):
    """A member may leave in good order as soon as it has done its part."""
    gen = world._gen
    direct, posted = gen.direct, []

    def barrier(options, plain=direct.barrier):
        posted.append(plain(options))
        gen.direct = object()  # as after the end: whatever it is asked for raises
        return posted[-1]

    direct.barrier = barrier
    try:
        with a_loop() as loop:
            forms_of(world, communicator, "barrier", loop)[form]()
    finally:
        gen.direct = direct
    assert len(posted) == 1


# -- mistakes ---------------------------------------------------------------------------------------------------

ONE, META = torch.ones(2), torch.ones(2, device="meta")
MISTAKES = [
    ("broadcast", (ONE, 5)), ("broadcast", (ONE, -1)), ("broadcast", (ONE, "0")), ("broadcast", (ONE, 0.5)),
    ("reduce", (ONE, 5)), ("reduce", (ONE, -1)), ("reduce", (ONE, "0")), ("reduce", (ONE, 0, "sum")),
    ("all_reduce", (ONE, "sum")), ("all_reduce", (ONE, [])), ("all_reduce", (3,)), ("all_reduce", (None,)),
    ("all_gather", ([], ONE)), ("all_gather", ([ONE, ONE], ONE)), ("all_gather", ([torch.ones(3)], ONE)),
    ("all_gather", ([ONE.int()], ONE)), ("all_gather", (5, ONE)), ("all_gather", ([ONE], 3)),
    ("all_gather_into_tensor", (torch.ones(3), ONE)), ("all_gather_into_tensor", (ONE.int(), ONE)),
    ("all_gather_into_tensor", ("x", ONE)),
    ("reduce_scatter_tensor", (torch.ones(3), ONE)), ("reduce_scatter_tensor", (ONE.int(), ONE)),
    ("reduce_scatter_tensor", (ONE, ONE, "sum")), ("reduce_scatter_tensor", (ONE, 3)),
    ("gather", (ONE, None, 0)), ("gather", (ONE, [ONE], 3)), ("gather", (ONE, [ONE, ONE], 0)),
    ("gather", (ONE, [ONE.int()], 0)), ("scatter", (ONE, None, 0)), ("scatter", (ONE, [ONE, ONE], 0)),
    ("scatter", (ONE, [ONE], 3)), ("reduce_scatter", (ONE, [])), ("reduce_scatter", (ONE, [ONE], "sum")),
    ("all_to_all", ([], [ONE])), ("all_to_all", ([ONE], [ONE, ONE])), ("all_to_all_single", (ONE, torch.ones(3))),
    ("send", ("x", 0)), ("recv", ("x", 0)),
]  # fmt: skip
OUR_OWN = [
    ("send", (ONE, 0)), ("send", (ONE, 7)), ("recv", (ONE, 0)), ("recv", (ONE, -1)), ("send", (META, 0)),
    ("recv", (META, 0)), ("broadcast", (META, 0)), ("reduce", (META, 0)), ("all_reduce", (META,)),
    ("all_gather", ([META], ONE)), ("all_gather_into_tensor", (ONE, META)), ("reduce_scatter_tensor", (ONE, META)),
    ("gather", (META, [ONE], 0)), ("barrier", (3,)),
]  # fmt: skip
"""Where a world checks what torch does not, or says more."""


def told(run, args):
    """The kind and the first line of what it raises; moments and addresses in it aside."""
    try:
        run(*args)
    except Exception as exc:  # noqa: BLE001  (whatever it is, it is to be the same)
        return type(exc), re.sub(r"F\d{4} [\d:.]+", "F", str(exc).partition("\n")[0])
    return None


def all_tell(world, communicator, name, args, *, without=()):
    with a_loop() as loop, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {
            form: told(run, args)
            for form, run in forms_of(world, communicator, name, loop).items()
            if form not in without
        }
    assert len(set(found.values())) == 1, found
    assert None not in found.values(), found
    return next(iter(found.values()))


@pytest.mark.parametrize(("name", "args"), MISTAKES)
def test_a_mistake_is_told_alike_by_every_form(world, communicator, name, args):
    # A message of something that is no tensor is told in words of ours.
    all_tell(world, communicator, name, args, without=("block",) if name in {"send", "recv"} else ())


@pytest.mark.parametrize(("name", "args"), OUR_OWN)
def test_what_worlds_check_themselves_is_told_alike_by_their_forms(world, communicator, name, args):
    if name == "barrier":
        with a_loop() as loop:
            forms = forms_of(world, communicator, name, loop)
            said = told(lambda: world.barrier(device_ids=args[0]), ())
            assert said[0] is TypeError
            assert told(forms["aio"], args) == said
        return
    kind, _ = all_tell(world, communicator, name, args, without=("block",))
    assert kind in {ValueError, mw.WrongDeviceError}


@pytest.mark.parametrize("name", COMPLETED)
def test_a_closed_world_is_told_alike_by_every_form(tmp_path, name):
    world = mw.join("table", 0, 1, store=f"file://{tmp_path}/store", timeout=WITHIN)
    communicator = WorldCommunicator()
    communicator.set_world(world.name, world)
    world.close()
    make, _ = cases(0, 1)[name]
    kind, _ = all_tell(world, communicator, name, make(), without=("communicator",))
    assert kind is mw.WorldClosedError
    if name in COMMUNICATED:  # pymultiworld knows one way for a world to be over
        with a_loop() as loop:
            kind, _ = told(forms_of(world, communicator, name, loop)["communicator"], make())
        assert kind is mw.BrokenWorldException
