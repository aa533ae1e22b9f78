from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.patchkit import GROUP, NCCL, NEW, TOPICS, Text, patch_bytes, series_contents, small_states

from m8d_build.errors import PatchRejected
from m8d_build.files.blobs import blob_id
from m8d_build.series.claims import Claims, claims_of, restate
from m8d_build.series.diffparse import parse_diff
from m8d_build.series.read import load_series, parse_series
from m8d_build.series.verify import DEFECTS, reject, verify
from m8d_build.targets import SourceFile, Status, Target, load_targets

STATES = small_states()
FIRST, SECOND, THIRD = (f"{n:04}-{topic}.patch" for n, topic in enumerate(TOPICS, 1))


def sources(state=STATES[0]):
    return {path: text.data for path, text in state.items() if text is not None}


def target(**changes) -> Target:
    made = Target(
        version="2.6.0",
        tag="v2.6.0",
        commit="",
        status=Status.APPLIES,
        note="",
        defects=("D5", "D6"),
        topics=tuple(TOPICS),
        files=tuple(SourceFile(path, blob_id(data)) for path, data in sources().items()),
        units=(),
        abi=None,
        wheels=(),
        distro_version="",
        **{
            field.name: ()
            for field in dataclasses.fields(Target)
            if field.name in {"pinned_packages", "build_packages"}
        },
    )
    return dataclasses.replace(made, **changes)


def contents() -> dict[str, bytes]:
    return series_contents(STATES, TOPICS)


def found(files, of=None, sources=None) -> set[tuple[str, str]]:
    return {(f.patch, f.code) for f in verify(of or target(), parse_series("2.6.0", files), sources)}


def test_a_good_series_has_no_findings_with_and_without_sources():
    assert found(contents()) == set()
    assert found(contents(), sources=sources()) == set()


def test_a_planned_version_needs_no_series():
    assert found({}, target(status=Status.PLANNED, topics=("world-scope",))) == set()
    assert found({}, target(topics=())) == {("series", "series")}


def listing(*names: str) -> bytes:
    return "".join(f"{name}\n" for name in names).encode()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"series": None}, ("series", "series")),
        ({"series": listing(SECOND, FIRST, THIRD)}, ("series", "order")),
        ({"series": listing(FIRST, SECOND)}, (THIRD, "orphan")),
        ({"series": listing(FIRST, SECOND, THIRD, THIRD)}, ("series", "duplicate")),
        ({"series": listing(FIRST, SECOND, THIRD, "0004-more.patch")}, ("series", "missing")),
        ({"series": listing(FIRST, SECOND, THIRD).replace(b"\n", b"\r\n")}, ("series", "crlf")),
        ({"series": listing(FIRST, SECOND, THIRD)[:-1]}, ("series", "final-newline")),
        ({"notes.txt": b"x"}, ("notes.txt", "orphan")),
        ({"0004-more.patch": b"x"}, ("0004-more.patch", "orphan")),
        ({SECOND: contents()[SECOND].replace(b"Topic: second-topic", b"Topic: other")}, (SECOND, "header")),
        (
            {SECOND: contents()[SECOND].replace(b"Upstream: not reported", b"Upstream: soon")},
            (SECOND, "header"),
        ),
        ({SECOND: contents()[SECOND].replace(b"BSD-3-Clause", b"MIT")}, (SECOND, "header")),
        ({SECOND: contents()[SECOND].replace(b"Ends: D5", b"Ends: D9")}, (SECOND, "header")),
        ({SECOND: contents()[SECOND].replace(b"Ends: D5", b"Ends: D1")}, (SECOND, "header")),
        ({SECOND: contents()[SECOND].replace(b"Ends: D5", b"Ends: D5 D5")}, (SECOND, "header")),
        ({SECOND: contents()[SECOND].replace(b"\n", b"\r\n")}, (SECOND, "crlf")),
        ({SECOND: contents()[SECOND].replace(b"@@ -49,3", b"@@ -49,4")}, (SECOND, "hunk")),
        ({SECOND: contents()[SECOND] + contents()[SECOND].partition(b"---\n")[2]}, (SECOND, "duplicate")),
    ],
)
def test_every_broken_rule_is_found_where_it_is(change, expected):
    files = {name: data for name, data in {**contents(), **change}.items() if data is not None}
    assert expected in found(files)


def test_two_patches_of_one_topic_are_found():
    files = contents()
    files["0003-first-topic.patch"] = files.pop(THIRD).replace(b"Topic: third", b"Topic: first-topic")
    files["series"] = listing(FIRST, SECOND, "0003-first-topic.patch")
    assert ("0003-first-topic.patch", "duplicate") in found(files)


def test_topics_must_be_the_targets_in_the_same_order():
    assert found(contents(), target(topics=tuple(reversed(TOPICS)))) == {("targets.toml", "topics")}
    assert found(contents(), target(topics=(*TOPICS, "more"))) == {("targets.toml", "topics")}


def test_the_first_patch_must_begin_at_the_recorded_blob():
    other = tuple(SourceFile(path, "1" * 40) for path in (NCCL, GROUP))
    assert found(contents(), target(files=other)) == {(FIRST, "blob")}


def test_only_a_verified_target_must_record_every_touched_file():
    assert found(contents(), target(files=())) == set()
    assert found(contents(), target(files=(), status=Status.VERIFIED)) == {("targets.toml", "blob")}


def test_a_broken_chain_of_blobs_is_found_without_sources():
    files = contents()
    blob = blob_id(STATES[1][GROUP].data).encode()
    files[SECOND] = files[SECOND].replace(blob, b"2" * 40)
    assert found(files) == {(SECOND, "chain")}


def test_the_blob_of_a_new_file_is_checked_without_sources():
    files = contents()
    files[THIRD] = files[THIRD].replace(b"+int marker;", b"+int market;")
    assert found(files) == {(THIRD, "blob")}


def test_a_patch_that_fits_only_with_an_offset_or_fuzz_is_found_with_sources():
    for text in (
        STATES[0][GROUP].replaced(0, 0, "pushed down"),
        STATES[0][GROUP].changed("group line 4", "other context"),
    ):
        assert (FIRST, "fuzz") in found(contents(), sources=sources({**STATES[0], GROUP: text}))


def test_a_source_that_is_not_the_recorded_one_is_found_even_where_all_hunks_fit():
    other = STATES[0][GROUP].changed("group line 30", "elsewhere")
    assert found(contents(), sources=sources({**STATES[0], GROUP: other})) == {
        (FIRST, "blob"),
        (SECOND, "blob"),
    }


def test_a_missing_source_is_found():
    assert found(contents(), sources={NCCL: sources()[NCCL]}) == {(FIRST, "source"), (SECOND, "source")}


def second_patch_from(post: Text, pre: Text | None = None) -> dict[str, bytes]:
    """A series whose second patch goes on from the first one's file."""
    files = contents()
    before = pre or STATES[1][NCCL]
    files[SECOND] = patch_bytes("second-topic", {NCCL: before}, {NCCL: post})
    files["series"] = listing(FIRST, SECOND)
    del files[THIRD]
    return files


TWO = target(topics=tuple(TOPICS[:2]))


def test_changing_an_earlier_patchs_lines_is_an_overlap():
    files = second_patch_from(STATES[1][NCCL].changed("and more", "and less"))
    assert found(files, TWO) == {(SECOND, "overlap")}


def test_adding_inside_an_earlier_patchs_lines_is_an_overlap():
    at = next(i for i, (_, line) in enumerate(STATES[1][NCCL].lines) if line == b"and more\n")
    files = second_patch_from(STATES[1][NCCL].replaced(at, at, "between"))
    assert found(files, TWO) == {(SECOND, "overlap")}


def test_adding_beside_an_earlier_patchs_lines_is_none():
    at = next(i for i, (_, line) in enumerate(STATES[1][NCCL].lines) if line == b"and more\n")
    for place in (at - 1, at + 1):
        files = second_patch_from(STATES[1][NCCL].replaced(place, place, "beside"))
        assert found(files, TWO) == set()


def test_context_an_earlier_patch_has_changed_is_found_without_sources():
    # Made against the unpatched file, with its lines moved to where the first patch puts them.
    stale = second_patch_from(STATES[0][NCCL].changed("nccl line 11", "eleven"), STATES[0][NCCL])
    stale[SECOND] = stale[SECOND].replace(b"@@ -10,3 +10,3 @@", b"@@ -11,3 +11,3 @@")
    assert (SECOND, "context") in found(stale, TWO)


def test_findings_come_in_the_order_of_the_series_with_lines():
    files = {name: data.replace(b"\n", b"\r\n") for name, data in contents().items()}
    findings = verify(target(), parse_series("2.6.0", files))
    names = [finding.patch for finding in findings if finding.patch.endswith(".patch")]
    assert names == sorted(names)
    assert all(finding.line >= 1 for finding in findings if finding.code == "crlf")
    assert findings == verify(target(), parse_series("2.6.0", files))


def test_reject_raises_with_every_finding_shown():
    findings = verify(target(), parse_series("2.6.0", {**contents(), "x.txt": b""}))
    with pytest.raises(PatchRejected, match="breaks 1 rule") as caught:
        reject("2.6.0", findings)
    assert "x.txt" in caught.value.tail
    reject("2.6.0", [])


MARKER = """diff --git a/m.cpp b/m.cpp
new file mode 100644
index 0000000000000000000000000000000000000000..{blob}
--- /dev/null
+++ b/m.cpp
@@ -0,0 +1,6 @@
+static constexpr char prefix[] = "m8d-patch-info:";
+static const char info[] =
+    "m8d-patch-info:"
+    "{{\\"schema\\":1,\\"torch\\":\\"2.6.0\\","
+    "\\"topics\\":[\\"first-topic\\",\\"marker\\"]}}";
+// 2.6.0
"""


def marker_diff() -> str:
    body = "".join(line[1:] + "\n" for line in MARKER.format(blob="").split("\n")[6:-1])
    return MARKER.format(blob=blob_id(body.encode()))


def test_what_the_library_will_say_is_read_from_the_patch():
    (file,), faults = parse_diff(marker_diff())
    assert faults == ()
    assert claims_of(file) == Claims("2.6.0", ("first-topic", "marker"))
    again = restate(file, Claims("2.7.1", ("marker",)))
    assert claims_of(again) == Claims("2.7.1", ("marker",))
    assert again.hunks[0].new[-1] == b"// 2.6.0\n"  # only the claims are touched


def test_a_marker_that_would_lie_is_found():
    files = contents()
    header = files[THIRD].partition(b"---\n")[0].replace(b"Topic: third", b"Topic: marker") + b"---\n"
    del files[SECOND], files[THIRD]
    files["0003-marker.patch"] = header + marker_diff().encode()
    files["series"] = listing(FIRST, "0003-marker.patch")
    honest = target(topics=("first-topic", "marker"))
    assert found(files, honest) == set()
    wrong = {**files, "0003-marker.patch": files["0003-marker.patch"].replace(b"2.6.0", b"2.5.0")}
    assert ("0003-marker.patch", "marker") in found(wrong, honest)


def test_known_defects_are_the_contracts():
    assert {"D0", "D8", "N1", "N4"} <= DEFECTS
    assert len(DEFECTS) == 13


def test_the_shipped_series_have_no_findings():
    patches = Path(__file__).parents[4] / "patches"
    for entry in load_targets(patches):
        assert verify(entry, load_series(patches, entry.version)) == []


@given(st.binary(max_size=300), st.sampled_from([FIRST, SECOND, THIRD, "series"]), st.integers(0, 900))
def test_no_garbage_makes_verify_fail_otherwise_than_by_findings(junk, name, at):
    files = contents()
    files[name] = files[name][:at] + junk + files[name][at + len(junk) :]
    verify(target(), parse_series("2.6.0", files), sources())


def test_the_sketch_knows_deleted_and_new_files():
    states = [STATES[0], {**STATES[0], NEW: Text.of("a", "b")}, {**STATES[0], NEW: Text.of("c")}]
    findings = found(series_contents(states, TOPICS[:2]), TWO, sources())
    assert findings == {(SECOND, "overlap")}
