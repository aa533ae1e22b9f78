"""pytest's side: ``--bed NAME=PYTHON``, a launcher for each build, and which tests are for which builds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bed.builds import Build, ask, parse_named
from bed.errors import BedError
from bed.ranks import Launcher

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bed.ranks import Ranks

__all__ = ["Launch", "add_options", "build", "launch", "launchers", "leave_one", "named", "parametrize"]

NO_BED = "no build of torch is named: --bed NAME=PYTHON (nox -s testbed finds some)"


@dataclass
class Launch:
    """What the tests get: a build, and its launcher. Calling it starts ranks (see `Launcher.start`)."""

    build: Build
    launcher: Launcher

    def __call__(self, program: str, world_size: int, **more: Any) -> Ranks:
        return self.launcher.start(program, world_size, **more)


def add_options(parser: pytest.Parser) -> None:
    """Add ``--bed``."""
    parser.addoption(
        "--bed",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="a build of torch for tests/testbed, by a name of your choice; may be given several times",
    )
    parser.addoption(
        "--bed-path",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder with packages for the ranks, where the builds have not all of them (numpy)",
    )


def named(config: pytest.Config) -> dict[str, Path]:
    """Return the builds of the command line.

    Raises:
        pytest.UsageError: one of them is wrong.
    """
    try:
        return parse_named(config.getoption("--bed"))
    except BedError as exc:
        raise pytest.UsageError(str(exc)) from exc


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Run every test that asks for a build on every build."""
    if "bed_name" in metafunc.fixturenames:
        metafunc.parametrize("bed_name", [*named(metafunc.config)] or ["no-bed"], scope="session")


def leave_one(config: pytest.Config, items: list[pytest.Item], folder: Path) -> None:
    """Where no build is named, leave one test of a folder, which is skipped: its reason stands for all of them."""
    if named(config):
        return
    _, *rest = [item for item in items if folder in item.path.parents] or [None]
    config.hook.pytest_deselected(items=rest)
    items[:] = [item for item in items if item not in rest]


@pytest.fixture(scope="session")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Launch]]:
    """The builds asked for so far; one fork server each, until the end."""
    made: dict[str, Launch] = {}
    try:
        yield made
    finally:
        for each in made.values():
            each.launcher.close()


@pytest.fixture(scope="session")
def launch(
    bed_name: str,
    launchers: dict[str, Launch],
    pytestconfig: pytest.Config,
    tmp_path_factory: pytest.TempPathFactory,
) -> Launch:
    """The launcher of a build; the first test that asks compiles the double if it must."""
    if bed_name not in launchers:
        from bed.build import build as compile_bed

        python = named(pytestconfig)[bed_name]
        extra = tuple(Path(each) for each in pytestconfig.getoption("--bed-path"))
        workdir = tmp_path_factory.mktemp(bed_name)
        launcher = Launcher(python, compile_bed(python), workdir=workdir, extra_path=extra)
        try:
            launchers[bed_name] = Launch(ask(bed_name, launcher), launcher)
        except BaseException:
            launcher.close()
            raise
    return launchers[bed_name]


@pytest.fixture(scope="session")
def build(launch: Launch) -> Build:
    """What the build says of itself."""
    return launch.build


@pytest.fixture(scope="session", autouse=True)
def _some_bed(pytestconfig: pytest.Config) -> None:
    """Skip what is left where no build is named, before anything is made."""
    if not named(pytestconfig):
        pytest.skip(NO_BED)


@pytest.fixture(autouse=True)
def _only_for(request: pytest.FixtureRequest) -> None:
    """Skip a test on the builds it is not for: ``@pytest.mark.patched``, ``stock``, ``backend(name)``."""
    if "launch" not in request.fixturenames:
        return
    found: Build = request.getfixturevalue("build")
    if request.node.get_closest_marker("patched") and not found.patched:
        pytest.skip(f"for patched builds; {found.name} is stock")
    if request.node.get_closest_marker("stock") and found.patched:
        pytest.skip(f"for stock builds; {found.name} is patched")
    for marker in request.node.iter_markers("backend"):
        if marker.args[0] not in found.backends:
            pytest.skip(f"{found.name} has no backend {marker.args[0]}")
