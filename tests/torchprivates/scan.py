"""Find the private names of other packages in the source of `multiworld`: read from its syntax trees, nothing is run."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from kits.importkit import full_name, imported_names

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "multiworld"
FIELDS = {"_type", "_other"}
"""Names that are fields of JSON formats (in-toto's statement), and a label of metrics."""


@dataclass
class Source:
    """A file: its tree, and what the names in it that were imported stand for."""

    path: str
    tree: ast.Module
    imported: dict[str, str] = field(default_factory=dict)

    def full_name(self, node: ast.expr) -> str | None:
        """Return the dotted name that an expression stands for, as far as imports tell; None if it is no name."""
        return full_name(node, self.imported)


def is_private(name: str) -> bool:
    """Whether a part of a dotted name begins with one underscore."""
    return any(
        part.startswith("_") and not (part.startswith("__") and part.endswith("__"))
        for part in name.split(".")
    )


def read(folder: Path = LIBRARY) -> list[Source]:
    """Read all files below a folder."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        source = Source(path.relative_to(folder.parent).as_posix(), tree, imported_names(tree))
        found.append(source)
    return found


def used(sources: list[Source]) -> dict[str, set[str]]:
    """Return the private names that are used and not defined in `sources`: the files by name.

    A name reached through an import of torch is whole (``torch._C.Future``); an attribute of a value, or a string
    (as for getattr), is its last part alone (``_get_backend``).
    """
    own = FIELDS.union(*(_defined(source.tree) for source in sources))
    found: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        for name in _names(source, own):
            found[name].add(source.path)
    return dict(found)


def _defined(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"namedtuple", "NewType"}:
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return names


def _names(source: Source, own: set[str]) -> set[str]:
    found = {name for name in source.imported.values() if name.startswith("torch.") and is_private(name)}
    pending: list[ast.AST] = [source.tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Attribute):
            whole = source.full_name(node)
            if whole is not None and whole.split(".")[0] == "torch":
                if is_private(whole):
                    found.add(whole)
                continue
            if is_private(node.attr) and node.attr not in own:
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if (text.isidentifier() and is_private(text) and text not in own) or (
                text.startswith("torch.") and " " not in text and is_private(text)
            ):
                found.add(text)
        elif isinstance(node, ast.JoinedStr):
            pending += [each for each in node.values if isinstance(each, ast.FormattedValue)]
            continue
        pending += ast.iter_child_nodes(node)
    return found


def strings(sources: list[Source], text: str) -> set[str]:
    """Return the files in which a string is written, as where an attribute is replaced by name."""
    return {
        source.path
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and node.value == text
    }


def methods(sources: list[Source]) -> dict[str, set[str]]:
    """Return the private methods of classes that derive from a class of torch: the files by name."""
    found: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and any(
                (source.full_name(base) or "").startswith("torch.") for base in node.bases
            ):
                for each in node.body:
                    if isinstance(each, ast.FunctionDef) and is_private(each.name):
                        found[each.name].add(source.path)
    return dict(found)
