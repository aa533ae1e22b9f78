"""Statements: written and read back, and compared with the wheel that they lie in."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.provenancekit import OVERLAY, PATCH, marker

from multiworld.errors import ProvenanceError
from multiworld.provenance.statement import (
    PORTED,
    Resource,
    Statement,
    contradictions,
    parse_statement,
    ported_words,
    statement_bytes,
)

DIGESTS = {"torch/m8d.json": "1" * 64, OVERLAY: marker().overlay.sha256}
SOUND = Statement(
    subjects=DIGESTS,
    torch="2.6.0",
    local="cu124.m8d1",
    mode="overlay",
    builder="1.0.0",
    inputs=(
        Resource("torch-2.6.0.whl", "2" * 64, uri="https://example.org/torch"),
        Resource("0001-group-guard.patch", PATCH),
        Resource("pytorch", marker().commit, "gitCommit"),
    ),
    tools={"compiler": "g++ 12", "zlib": "1.3"},
)

names = st.text(min_size=1, max_size=20)
hexes = st.text("0123456789abcdef", min_size=64, max_size=64)


@given(
    st.dictionaries(names, hexes, max_size=4),
    st.lists(st.builds(Resource, names, hexes, st.sampled_from(["sha256", "gitBlob"]), st.text(max_size=9))),
    st.dictionaries(names, names, max_size=3),
)
def test_what_is_written_is_read_back(subjects, inputs, tools):
    made = replace(SOUND, subjects=subjects, inputs=tuple(inputs), tools=tools)
    data = statement_bytes(made)
    assert parse_statement(data, where="here") == made
    assert statement_bytes(parse_statement(data, where="here")) == data


def test_the_order_of_a_mapping_does_not_show():
    other = replace(
        SOUND, subjects=dict(reversed(DIGESTS.items())), tools=dict(reversed(SOUND.tools.items()))
    )
    assert statement_bytes(other) == statement_bytes(SOUND)


def test_it_has_the_fields_of_in_toto_and_slsa():
    raw = json.loads(statement_bytes(SOUND))
    assert raw["_type"] == "https://in-toto.io/Statement/v1"
    assert raw["predicateType"] == "https://slsa.dev/provenance/v1"
    assert {"name": OVERLAY, "digest": {"sha256": DIGESTS[OVERLAY]}} in raw["subject"]
    build = raw["predicate"]["buildDefinition"]
    assert build.keys() == {
        "buildType", "externalParameters", "internalParameters", "resolvedDependencies"
    }  # fmt: skip
    assert build["resolvedDependencies"][0] == {
        "name": "torch-2.6.0.whl", "digest": {"sha256": "2" * 64}, "uri": "https://example.org/torch"
    }  # fmt: skip
    assert raw["predicate"]["runDetails"]["builder"]["id"] == "pkg:pypi/m8d@1.0.0"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw.pop("subject"), "no 'subject'"),
        (lambda raw: raw.update(_type="x"), "its type is 'x'"),
        (lambda raw: raw.update(more=1), "it says more"),
        (lambda raw: raw["subject"].append(raw["subject"][0]), "a subject is named twice"),
        (lambda raw: raw["subject"][0]["digest"].update(sha256="z"), "'z' is no digest"),
        (lambda raw: raw["subject"][0]["digest"].update(sha256=3), "3 is no digest"),
        (lambda raw: raw.update(predicate=None), "not subscriptable"),
    ],
)
def test_another_file_is_refused(change, said):
    raw = json.loads(statement_bytes(SOUND))
    change(raw)
    with pytest.raises(ProvenanceError, match="here cannot be read") as caught:
        parse_statement(json.dumps(raw).encode(), where="here")
    assert said in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"null"])
def test_what_is_no_statement_is_refused(data):
    with pytest.raises(ProvenanceError):
        parse_statement(data, where="here")


def test_a_sound_one_contradicts_nothing():
    assert contradictions(SOUND, marker(), {**DIGESTS, "torch/other.py": "9" * 64}) == ()


@pytest.mark.parametrize(
    ("statement", "digests", "mark", "said"),
    [
        (SOUND, {**DIGESTS, OVERLAY: "3" * 64}, marker(), f"{OVERLAY} has SHA-256 {'3' * 64}"),
        (SOUND, {"torch/m8d.json": "1" * 64}, marker(), f"{OVERLAY} was built, and is not there"),
        (SOUND, DIGESTS, None, "there is no torch/m8d.json"),
        (replace(SOUND, subjects={}), DIGESTS, marker(), "says nothing of torch/m8d.json"),
        (replace(SOUND, torch="2.7.0"), DIGESTS, marker(), "says torch 2.7.0, torch/m8d.json says 2.6.0"),
        (replace(SOUND, local="x"), DIGESTS, marker(), "says label x"),
        (replace(SOUND, mode="full"), DIGESTS, marker(), "says mode full"),
        (replace(SOUND, builder="0"), DIGESTS, marker(), "says toolchain 0"),
        (
            SOUND,
            DIGESTS,
            marker(ported_from="2.5.1"),
            "says ported no, torch/m8d.json says from 2.5.1's series",
        ),
        (
            replace(SOUND, tools={PORTED: ported_words("2.5.1")}),
            DIGESTS,
            marker(),
            "says ported from 2.5.1's series, not proven by hand, torch/m8d.json says no",
        ),
        (replace(SOUND, inputs=SOUND.inputs[:2]), DIGESTS, marker(), "does not name PyTorch's commit"),
        (replace(SOUND, inputs=SOUND.inputs[2:]), DIGESTS, marker(), "does not name the patch group-guard"),
    ],
)
def test_each_contradiction_is_told(statement, digests, mark, said):
    found = contradictions(statement, mark, digests)
    assert any(said in each for each in found), found
