"""What modules import, read from their sources: full names of what they use, and circles among them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path


@dataclass(frozen=True)
class Import:
    """One module imports another.

    Attributes:
        importer, imported: dotted names ("m8d_build.series.read").
        deferred: inside a function; imports under TYPE_CHECKING are not, they tie modules just as much.
    """

    importer: str
    imported: str
    deferred: bool = False


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Return what the names in a file that were imported stand for: ``{"c10d": "torch.distributed.c10d"}``."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                found[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def full_name(node: ast.expr, imported: Mapping[str, str]) -> str | None:
    """Return the dotted name that an expression stands for, as far as imports tell; None if it is no name."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, node.id)
    if isinstance(node, ast.Attribute) and (left := full_name(node.value, imported)):
        return f"{left}.{node.attr}"
    return None


def modules_of(package: Path, *, without: Iterable[Path] = ()) -> dict[str, Path]:
    """Return a package's files by module; those in the folders of `without` are left out."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        if not set(without) & set(path.parents):
            parts = (package.name, *path.relative_to(package).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(sources: Mapping[str, str]) -> set[Import]:
    """Return what modules import of one another, from their sources."""
    found = set()
    for importer, source in sources.items():
        for name, deferred in _named(ast.parse(source), deferred=False):
            # `from package import thing`: thing is a module or a name of the package's own.
            imported = name if name in sources else name.rpartition(".")[0]
            if imported in sources and imported != importer:
                found.add(Import(importer, imported, deferred))
    return found


def _named(node: ast.AST, *, deferred: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, deferred) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from ((f"{child.module}.{alias.name}", deferred) for alias in child.names)
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _named(child, deferred=deferred or function)


def circles(
    imports: Iterable[Import], allowed: Mapping[tuple[str, str], str] | None = None
) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others.

    Args:
        imports: deferred ones count too: they hide a circle, and do not open it.
        allowed: deferred imports, (importer, imported), that do not count, each with its reason.
    """
    arrows: dict[str, set[str]] = {}
    for each in imports:
        if not (each.deferred and (each.importer, each.imported) in (allowed or {})):
            arrows.setdefault(each.importer, set()).add(each.imported)
            arrows.setdefault(each.imported, set())
    reached = {module: _reached(module, arrows) for module in arrows}
    groups = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in arrows
        if module in reached[module]
    }
    return sorted(map(list, groups))


def _reached(module: str, arrows: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [*arrows[module]]
    while waiting:
        if (each := waiting.pop()) not in seen:
            seen.add(each)
            waiting += arrows[each]
    return seen
