"""A nested state as text and tensors: what comes back is what was given, and nothing else gets through."""

from __future__ import annotations

import collections
import enum
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld._core.state_tree import DEPTH, dotted, flatten, rebuild
from multiworld.errors import StateError


class Leaf:
    """Stands in for a tensor."""


def is_leaf(value):
    return isinstance(value, Leaf)


def there_and_back(value):
    text, leaves = flatten(value, is_leaf)
    assert text.isascii()
    left = iter(leaves)

    def leaf(path):
        expected, found = next(left)
        assert path == expected
        return found

    back = rebuild(text, leaf)
    assert next(left, None) is None
    return back


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(
            type(a) is type(b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one is other or one == other


def counter(counts):
    made = collections.Counter()
    dict.update(made, counts)  # whatever the values are
    return made


small = st.integers(-(2**53) + 1, 2**53 - 1)
atoms = (
    st.none() | st.booleans() | small | st.integers() | st.floats() | st.text() | st.binary()
    | st.builds(Leaf) | st.text(st.characters())  # lone surrogates too
)  # fmt: skip
states = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | small, inner, max_size=5)
        | st.dictionaries(st.text() | small, inner, max_size=5).map(counter)
    ),
    max_leaves=30,
)


@given(states)
def test_what_comes_back_is_what_was_given(value):
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("bits", [0x7FF8000000000001, 0xFFF4000000000002, 0x8000000000000000, 1])
def test_a_float_keeps_its_bits(bits):
    (value,) = struct.unpack(">d", bits.to_bytes(8, "big"))
    assert same(there_and_back([value]), [value])


def test_a_number_of_any_size():
    assert there_and_back(-(7**20_000)) == -(7**20_000)
    for value in (2**53 - 1, 2**53, -(2**53), -(2**53) + 1):
        assert there_and_back(value) == value


def test_kinds_of_keys_survive():
    state = {"1": Leaf(), 1: Leaf(), "a.b": {"c": 0}}
    assert same(there_and_back(state), state)
    assert [path for path, _ in flatten(state, is_leaf)[1]] == [("1",), (1,)]


def test_an_ordered_dict_comes_back_as_a_dict():
    assert type(there_and_back(collections.OrderedDict(a=1))) is dict


def test_paths_as_people_read_them():
    assert dotted(("model", "layers", 0, "weight")) == "model.layers.0.weight"
    assert dotted(()) == "the state itself"


class Number(enum.IntEnum):
    ONE = 1


Pair = collections.namedtuple("Pair", "a b")  # noqa: PYI024


@pytest.mark.parametrize(
    "value",
    [
        {1},
        1j,
        Number.ONE,
        Pair(1, 2),
        type("Votes", (collections.Counter,), {})("a"),
        collections.defaultdict(int),
        range(3),
        object(),
        print,
    ],
    ids=repr,
)
def test_anything_else_is_refused_with_its_path(value):
    with pytest.raises(StateError, match=r"^model\.0\.x is a ") as caught:
        flatten({"model": [{"x": value}]}, is_leaf)
    assert type(value).__qualname__ in str(caught.value)
    assert caught.value.rule
    assert caught.value.next_step


@pytest.mark.parametrize("key", [True, None, 1.0, (1,), 2**53, -(2**53), Number.ONE], ids=repr)
def test_other_keys_are_refused(key):
    with pytest.raises(StateError, match=r"^a has the key "):
        flatten({"a": {key: 1}}, is_leaf)


def test_a_state_that_contains_itself_is_refused():
    value: dict = {}
    value["self"] = [value]
    with pytest.raises(StateError, match="contains itself"):
        flatten(value, is_leaf)


def nested(depth):
    value = 0
    for _ in range(depth):
        value = [value]
    return value


def test_as_deep_as_can_be():
    assert there_and_back(nested(DEPTH)) == nested(DEPTH)
    with pytest.raises(StateError, match="inside of each other"):
        flatten(nested(DEPTH + 1), is_leaf)


DEEPER = '["l",' * (DEPTH + 1) + "0" + "]" * (DEPTH + 1)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "{}", '{"a":1}', "[]", "[1]", "[[1]]", '["x",1]', '["l', '["T",1]', '["d",1]', '["d","a"]',
        '["d","a",1,"a",2]', '["c","a"]', '["c","a",1,"a",2]', '["d",null,1]', '["d",true,1]', '["d",["i","5"],1]', f'["d",{2**53},1]', '["f",1]',
        '["f","1.0"]', '["f","7ff8"]', '["f"," 7ff80000000000"]', '["i","0x1"]', '["i","1_0"]', '["i",""]', '["i",3]',
        '["b","="]', '["b","é"]', '["b",7]', "1.5", "NaN", "-Infinity", "9" * 20, "9" * 1_000_000, DEEPER,
        "[" * 100_000, '["l",' * 100_000, '["i","1","2"]', "1e400", '"a" "b"',
    ],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_a_damaged_description_is_refused(text):
    with pytest.raises(StateError) as caught:
        rebuild(text, lambda path: None)
    assert len(str(caught.value)) < 1000


@given(st.text() | states.map(lambda value: flatten(value, is_leaf)[0]), st.data())
def test_a_description_with_damage_is_a_value_or_an_error(text, data):
    at = data.draw(st.integers(0, max(0, len(text) - 1)))
    text = text[:at] + data.draw(st.text(max_size=3)) + text[at + data.draw(st.integers(0, 3)) :]
    try:
        rebuild(text, lambda path: None)
    except StateError:
        return


def test_a_million_keys_of_one_hash_are_refused_at_once():
    """Such a dict would take hours: a number's hash is itself, modulo 2^61 - 1."""
    same_hash = [1 + each * (2**61 - 1) for each in range(1, 100_000)]
    text = json.dumps(["d", *(part for key in same_hash for part in (key, 0))])
    with pytest.raises(StateError):
        rebuild(text, lambda path: None)
