from __future__ import annotations

from pathlib import Path

import pytest

from m8d_build.settings import REPO_ROOT, Settings, available_memory_mb


def test_an_argument_beats_the_environment_and_that_the_default(tmp_path: Path) -> None:
    given = Settings.load(cache=tmp_path / "a", environ={"M8D_CACHE": str(tmp_path / "b")})
    assert given.cache == tmp_path / "a"
    assert Settings.load(environ={"M8D_CACHE": str(tmp_path / "b")}).cache == tmp_path / "b"
    assert Settings.load(environ={}).cache.name == "m8d"
    assert Settings.load(jobs=3, environ={"M8D_JOBS": "7"}).jobs == 3
    assert Settings.load(environ={"M8D_JOBS": "7"}).jobs == 7
    assert Settings.load(environ={}).jobs >= 1


@pytest.mark.parametrize(
    ("environ", "compiler"),
    [({}, "g++"), ({"CXX": "clang++"}, "clang++"), ({"CXX": "clang++", "M8D_CXX": "g++-12"}, "g++-12")],
)
def test_the_compiler_is_ours_then_everybodys_then_gcc(environ: dict[str, str], compiler: str) -> None:
    assert Settings.load(environ=environ).compiler == compiler


@pytest.mark.parametrize("name", ["M8D_JOBS", "M8D_MEMORY_MB"])
@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_wrong_number_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        Settings.load(environ={name: value})


def test_compilers_get_the_memory_that_is_asked_for_or_a_modest_share() -> None:
    assert Settings.load(environ={"M8D_MEMORY_MB": "9000"}).memory_mb == 9000
    assert 0 < Settings.load(environ={}).memory_mb <= 2300


def test_nothing_is_kept_inside_the_repository_by_default() -> None:
    assert REPO_ROOT not in Settings.load(environ={}).cache.parents
    assert Settings.load(environ={}).patches == REPO_ROOT / "patches"


def test_the_machines_memory_is_known_on_linux() -> None:
    assert available_memory_mb() > 10
