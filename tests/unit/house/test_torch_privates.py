"""The private names of torch that the package uses are those that docs/torch-privates.md lists and explains."""

from __future__ import annotations

import ast

import pytest
from torchprivates import page
from torchprivates.scan import Source, methods, used


def source(text: str) -> Source:
    found = Source("multiworld/x.py", ast.parse(text))
    found.imported = {"torch": "torch", "c10d": "torch.distributed.distributed_c10d", "sys": "sys"}
    return found


def test_every_private_name_that_is_used_is_listed() -> None:
    _, strange = page.found()
    assert not strange, "add these to tests/torchprivates/uses.toml, and run python -m torchprivates"


def test_every_listed_name_is_used() -> None:
    files, _ = page.found()
    assert [name for name, where in files.items() if not where] == []


def test_the_page_is_made_from_the_list() -> None:
    assert page.PAGE.read_text() == page.text(), "run python -m torchprivates in tests/"


def test_every_entry_says_what_breaks() -> None:
    names = [name for use in page.uses() for name in use["names"]]
    assert len(names) == len(set(names))
    for use in page.uses():
        assert use["how"] in {"read", "replaced", "overridden"}
        assert use["why"]
        assert use["breaks"]
        assert use["guard"]
        assert {"library", "seen", "lacking"} & use.keys(), (
            f"{use['names']}: in which versions of torch was it seen?"
        )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("c10d._world", "torch.distributed.distributed_c10d._world"),
        ("torch._C.Future.then", "torch._C.Future.then"),
        ("pg._get_backend(d)", "_get_backend"),
        ("getattr(pg, '_group_end', None)", "_group_end"),
        ("MODULES = {'torch._dynamo.guards': 1}", "torch._dynamo.guards"),
    ],
)
def test_a_private_name_is_found(text: str, name: str) -> None:
    assert name in used([source(text)])


@pytest.mark.parametrize(
    "text",
    [
        "self._x = 1\nself._x",
        "def _own(): pass\nx._own",
        "c10d.get_rank()",
        "x.__class__",
        "f'{kind}_backend'",
    ],
)
def test_what_is_ours_or_public_is_not(text: str) -> None:
    assert used([source(text)]) == {}


def test_overriding_methods_are_found() -> None:
    text = (
        "class A(c10d.B):\n  def _run(self): pass\n  def run(self): pass\nclass C:\n  def _stop(self): pass"
    )
    assert methods([source(text)]) == {"_run": {"multiworld/x.py"}}
