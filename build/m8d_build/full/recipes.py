"""Recipes: how each PyTorch version is built from source, read from build/conda/recipes.toml, validated."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from m8d_build.errors import PrerequisiteMissing, UnknownVersion
from m8d_build.settings import REPO_ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["RECIPES_FOLDER", "CudaLine", "Recipe", "Recipes", "load_recipes"]

RECIPES_FOLDER = REPO_ROOT / "build" / "conda"
SCHEMA = 1


@dataclass(frozen=True)
class CudaLine:
    """One CUDA version wheels are built for.

    Attributes:
        version: "12.4".
        label: what the wheel's local version begins with ("cu124").
        archs: GPU architectures of the official wheels, as TORCH_CUDA_ARCH_LIST has them.
        nvcc: flags for nvcc.
        gcc_max: newest major version of GCC its headers accept.
        rpath: NVIDIA's library folders in site-packages.
    """

    version: str
    label: str
    archs: tuple[str, ...]
    nvcc: tuple[str, ...]
    gcc_max: int
    rpath: tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """How a range of PyTorch versions is built.

    Attributes:
        since: first version it holds for.
        before: first version it no longer holds for.
        cuda: the CUDA line.
        pythons: Python versions it can be built for ("3.11").
        gcc_min: oldest GCC that PyTorch accepts ("9.3").
        environment: conda environment file, ``{python}`` to be filled in.
        requirements: pip requirements of the build.
        libraries: NVIDIA's packages the build links against, installed without what they depend on.
        links: folders in site-packages whose headers and libraries are linked into one place.
        configure: arguments to Python that run CMake alone, () if this version cannot.
        wheel: arguments to Python that build the wheel; ``{dist}`` is the folder it goes to.
        switches: build switches of these versions, by name.
        requires: the wheel's requirements beyond setup.py's own.
        magma: whether the conda environment brings MAGMA.
    """

    since: Version
    before: Version
    cuda: CudaLine
    pythons: tuple[str, ...]
    gcc_min: str
    environment: str
    requirements: str
    libraries: str
    links: tuple[str, ...]
    configure: tuple[str, ...]
    wheel: tuple[str, ...]
    switches: tuple[tuple[str, str], ...]
    requires: tuple[str, ...]
    magma: bool

    def holds_for(self, version: str) -> bool:
        """Return whether a torch version is in this recipe's range."""
        return self.since <= Version(version) < self.before

    @property
    def files(self) -> tuple[str, ...]:
        """The files beside recipes.toml that it names."""
        return (self.environment, self.requirements, self.libraries)


@dataclass(frozen=True)
class Recipes:
    """All recipes, and the folder their files are in."""

    folder: Path
    entries: tuple[Recipe, ...]

    def get(self, version: str) -> Recipe:
        """Return the recipe of a torch version.

        Raises:
            UnknownVersion: there is none.
        """
        for recipe in self.entries:
            if recipe.holds_for(version):
                return recipe
        known = ", ".join(str(recipe.since) for recipe in self.entries) or "none"
        raise UnknownVersion(
            f"torch {version} has no recipe for a full build",
            rule=f"{self.folder / 'recipes.toml'} has {known}",
            next_step="Use `overlay`, which needs none, or add a [[torch]] entry there (docs/full-build.md "
            "says how)",
        )

    def text(self, name: str) -> str:
        """Return the text of a file beside recipes.toml.

        Raises:
            PrerequisiteMissing: it cannot be read.
        """
        return _read(self.folder / name)


def load_recipes(folder: Path = RECIPES_FOLDER) -> Recipes:
    """Read recipes.toml.

    Raises:
        PrerequisiteMissing: it is missing, is no TOML, or breaks the schema; the message names the entry.
    """
    path = folder / "recipes.toml"
    try:
        data = tomllib.loads(_read(path))
    except tomllib.TOMLDecodeError as exc:
        raise _bad(path, f"is no TOML: {exc}") from exc
    if data.get("schema") != SCHEMA:
        raise _bad(path, f"has schema {data.get('schema')!r}, must be {SCHEMA}")
    lines: dict[str, CudaLine] = {}
    entries: list[Recipe] = []
    where = ""
    try:
        for raw in data.get("cuda", []):
            where = f"cuda {raw.get('version', '?')}"
            lines[raw["version"]] = _line(raw)
        for raw in data.get("torch", []):
            where = f"torch {raw.get('since', '?')}"
            entries.append(_recipe(raw, lines))
    except (KeyError, ValueError, TypeError) as exc:
        raise _bad(path, f"{where} breaks the schema: {type(exc).__name__}: {exc}") from exc
    entries.sort(key=lambda recipe: recipe.since)
    for one, other in pairwise(entries):
        if other.since < one.before:
            raise _bad(path, f"torch {one.since} and torch {other.since} overlap")
    return Recipes(folder, tuple(entries))


def _line(raw: Mapping[str, Any]) -> CudaLine:
    return CudaLine(
        version=raw["version"],
        label=raw["label"],
        archs=tuple(raw["archs"]),
        nvcc=tuple(raw["nvcc"]),
        gcc_max=int(raw["gcc_max"]),
        rpath=tuple(raw["rpath"]),
    )


def _recipe(raw: Mapping[str, Any], lines: Mapping[str, CudaLine]) -> Recipe:
    wheel = tuple(raw["wheel"])
    if "{dist}" not in wheel:
        raise ValueError("wheel names no {dist}")
    return Recipe(
        since=Version(raw["since"]),
        before=Version(raw["before"]),
        cuda=lines[raw["cuda"]],
        pythons=tuple(raw["python"]),
        gcc_min=raw["gcc_min"],
        environment=raw["environment"],
        requirements=raw["requirements"],
        libraries=raw["libraries"],
        links=tuple(raw["links"]),
        configure=tuple(raw["configure"]),
        wheel=wheel,
        switches=tuple(sorted(raw["switches"].items())),
        requires=tuple(raw["requires"]),
        magma=bool(raw["magma"]),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise PrerequisiteMissing(
            f"{path} cannot be read: {exc}",
            rule="a full build needs the recipes of the repository",
            next_step="Restore it with `git checkout build/conda`",
        ) from exc


def _bad(path: Path, what: str) -> PrerequisiteMissing:
    return PrerequisiteMissing(f"{path} {what}", next_step="Correct the entry; `git diff` shows what changed")
