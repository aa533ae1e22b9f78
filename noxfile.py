"""What people and CI run. `nox -l` lists it; every session works from a fresh clone."""

from __future__ import annotations

import os
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "tests"]

ROOT = Path(__file__).parent
# The toolchain is a plain folder: nothing is installed from build/.
ENV = {"PYTHONPATH": f"{ROOT / 'build'}{os.pathsep}{ROOT}", "PYTHONUNBUFFERED": "1"}
TOOLCHAIN = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "toolchain")
TEST = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "test")
LINT = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "lint")


@nox.session(tags=["ci"])
def lint(session: nox.Session) -> None:
    """Ruff and mypy, strict."""
    session.install(*TOOLCHAIN, *TEST, *LINT)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", env=ENV)


@nox.session(tags=["ci"])
def tests(session: nox.Session) -> None:
    """Everything that needs no CUDA wheel (`-- ARGS` go to pytest)."""
    session.install(*TOOLCHAIN, *TEST)
    session.run("python", "-m", "pytest", *session.posargs, env=ENV)


@nox.session(name="build-torch", tags=["ci"])
def build_torch(session: nox.Session) -> None:
    """Official wheel + sources -> patched wheel in out/ (`-- --help` for the options)."""
    session.install(*TOOLCHAIN)
    session.run("python", "-m", "m8d_build", "build", *session.posargs, env=ENV)


@nox.session(name="check-wheel", tags=["ci"])
def check_wheel(session: nox.Session) -> None:
    """Install a patched wheel in a fresh environment and show how it behaves (`-- WHEEL`; default: the last built)."""
    session.install(*TOOLCHAIN)
    session.run("python", "-m", "m8d_build", "check", *session.posargs, env=ENV)


@nox.session
def bench(session: nox.Session) -> None:
    """Time the toolchain on the real 2.6.0 and store the figures as JSON (`-- --help`)."""
    session.install(*TOOLCHAIN)
    session.run("python", "benchmarks/toolchain.py", *session.posargs, env=ENV)


@nox.session
def m8d(session: nox.Session) -> None:
    """Any other command of the toolchain: `nox -s m8d -- verify`."""
    session.install(*TOOLCHAIN)
    session.run("python", "-m", "m8d_build", *session.posargs, env=ENV)
