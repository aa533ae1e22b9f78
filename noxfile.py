"""What people and CI run. `nox -l` lists it; every session works from a fresh clone."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

import nox
from nox.command import CommandFailed

sys.path.insert(0, str(Path(__file__).parent / "build"))
from m8d_build.testing import versions

nox.needs_version = ">=2025.2.9"  # dependency_groups
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "tests"]

ROOT = Path(__file__).parent
# The toolchain is a plain folder: nothing is installed from build/.
ENV = {"PYTHONPATH": f"{ROOT / 'build'}{os.pathsep}{ROOT}", "PYTHONUNBUFFERED": "1"}
TOOLCHAIN = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "toolchain")
TEST = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "test")
# One torch for everyday work, a CPU build (see `install`); `tests-torch` goes through the others.
TORCH = ["torch==2.13.0", "numpy>=1.26"]
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
"""PyTorch's index of them, 200 MB each: PyPI's builds for Linux bring CUDA, several GB."""
PLACES = {"index-url", "extra-index-url", "find-links", "no-index"}
"""Options of pip that say where packages are."""
# The examples that train read a file of it, and nothing else.
DIGITS = ["--no-deps", "scikit-learn>=1.3"]
# The game of examples/rl_weights.py.
GAME = ["gymnasium>=1.0"]
DOCS = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "docs")
LINT = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "lint")
BENCH = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "bench")
# The model and the HTTP front of examples/llm_serving.
SERVING = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "serving")
PAGE = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "page")
CLUSTERS = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "clusters")
NO_TESTS = 5
"""pytest's exit code where all were skipped before they were collected: there is no browser."""
ELSEWHERE = "--ignore=tests/clusters"
"""What `nox -s clusters` runs: it needs more packages, and programs of a cluster."""


def install(session: nox.Session, *packages: str) -> None:
    """Install packages, torch among them: its CPU build, unless the user's pip is told where packages are."""
    # uv's environments have no pip, and uv has settings of its own.
    uv = session.venv_backend == "uv"
    said = "" if uv else session.run_install("python", "-m", "pip", "config", "list", silent=True)
    told = {line.partition("=")[0].rpartition(".")[2] for line in str(said).splitlines()}
    # pip takes a version with a local label (2.13.0+cpu) before the same one without.
    env = {} if uv or PLACES & told or sys.platform != "linux" else {"PIP_EXTRA_INDEX_URL": CPU_BUILDS}
    link_torch(session)
    session.install(*packages, env=env)


def link_torch(session: nox.Session) -> None:
    """Link torch's files from the environment that M8D_TORCH_FROM names, where this one has none yet.

    CI sets it: pip needs a minute and a half of processor time to unpack torch and to hash what it wrote.
    Where pip finds another version than it was told to install, it installs that one.
    """
    if not (lender := os.environ.get("M8D_TORCH_FROM")):
        return
    (theirs,) = Path(lender).glob("lib/python3*/site-packages")
    (ours,) = Path(session.virtualenv.location).glob("lib/python3*/site-packages")
    if theirs.parent.name != ours.parent.name or (ours / "torch").exists():  # another Python
        return
    for each in ("torch-*.dist-info", "torch", "torchgen", "functorch"):
        for folder in theirs.glob(each):
            shutil.copytree(folder, ours / folder.name, copy_function=os.link)


@nox.session(tags=["ci"])
def lint(session: nox.Session) -> None:
    """Ruff, bandit, mypy strict (torch is there for its types), and known vulnerabilities of what we need."""
    install(session, *TOOLCHAIN, *TEST, *BENCH, *LINT, *TORCH)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("bandit", "--quiet", "-c", "pyproject.toml", "-r", "multiworld", "build/m8d_build")
    session.run("mypy", env=ENV)
    session.run("python", "-m", "m8d_build", "audit", env=ENV)


@nox.session
def tests(session: nox.Session) -> None:
    """What needs no CUDA wheel, without what takes long: about eight minutes (`-- ARGS` go to pytest)."""
    install(session, *TOOLCHAIN, *TEST, *BENCH, *TORCH, *GAME, *SERVING)
    session.install(*DIGITS)
    if session.posargs:
        session.run("python", "-m", "pytest", "--parts", *session.posargs, env=ENV)
    else:
        session.run("python", "tests/shares.py", "--parts", "-m", "not long", ELSEWHERE, env=ENV)


@nox.session(name="tests-all", tags=["ci"])
def tests_all(session: nox.Session) -> None:
    """Every test that needs no CUDA wheel, soaks and examples too; half an hour (`-- -m long`: those).

    `--but-covered` leaves out those that `nox -s coverage` runs.
    """
    install(session, *TOOLCHAIN, *TEST, *BENCH, *TORCH, *GAME, *SERVING)
    session.install(*DIGITS)
    chosen = [ELSEWHERE]
    for each in session.posargs:
        chosen += [f"--ignore={path}" for path in CORE_TESTS] if each == "--but-covered" else [each]
    session.run("python", "-m", "pytest", "--parts", *chosen, env=ENV)


@nox.session
def unit(session: nox.Session) -> None:
    """What needs no torch: decisions and the toolchain (`-- ARGS` go to pytest)."""
    session.install(*TOOLCHAIN, *TEST, *BENCH)
    session.run("python", "-m", "pytest", "tests/unit", "tests/integration", *session.posargs, env=ENV)


# What reaches every statement and branch of multiworld/_core, without torch.
CORE_TESTS = [
    f"tests/unit/core/test_{name}.py"
    for name in (
        "busy", "detector", "durations", "earliest", "early_close", "lane", "lane_greeting", "lane_model",
        "lane_schedules",
        "lane_short_ways", "lifecycle", "membership", "membership_advances", "membership_assigned",
        "membership_letters", "membership_rendezvous", "membership_simulated", "nccl_policy",
        "operations_lateness",
        "operations_log", "operations_totals", "operations_waiting", "packet_filter", "questions", "raising",
        "reachability", "resharding", "sampling", "state_pieces", "state_tree", "store_carrying",
        "store_clients", "store_serving", "timeline",
        "unread_messages", "watchdog_peers", "weights", "wire",
    )
]  # fmt: skip


@nox.session(tags=["ci"])
def coverage(session: nox.Session) -> None:
    """What decides is tested completely, branches too: less than 100 % of multiworld/_core fails."""
    session.install(*TOOLCHAIN, *TEST, "coverage[toml]>=7.4")
    # A fixed seed: whether a branch is covered must not depend on what hypothesis draws.
    session.run(
        "coverage", "run", "--branch", "--source=multiworld._core",
        "-m", "pytest", "-q", "--hypothesis-seed=0", *CORE_TESTS, *session.posargs, env=ENV,
    )  # fmt: skip
    session.run("coverage", "report", "--show-missing", "--fail-under=100")


@nox.session
def mutants(session: nox.Session) -> None:
    """One-line mutations of deciding code that no test finds (`-- FILE ...`, `-- --list`; hours)."""
    install(session, *TOOLCHAIN, *TEST, *TORCH, "cosmic-ray>=8.3")
    session.run("python", "tests/mutants.py", *session.posargs, env=ENV)


@nox.session(tags=["ci"])
def page(session: nox.Session) -> None:
    """The page in a real browser: Chromium, if it is on the PATH (`-- ARGS` go to pytest)."""
    install(session, *TOOLCHAIN, *TEST, *PAGE, *TORCH)
    session.run("python", "-m", "pytest", "tests/web", *session.posargs, env=ENV, success_codes=[0, NO_TESTS])


@nox.session(tags=["ci"])
def clusters(session: nox.Session) -> None:
    """What deploy/ has, on real clusters of this machine, as far as their programs are here (`-- ARGS`)."""
    install(session, *TOOLCHAIN, *TEST, *CLUSTERS, *TORCH)
    session.run(
        "python", "-m", "pytest", "tests/clusters", *session.posargs, env=ENV, success_codes=[0, NO_TESTS]
    )


MATRIX = argparse.ArgumentParser(prog="nox -s tests-torch --", epilog="Other arguments go to pytest.")
MATRIX.add_argument("--torch", nargs="+", default=[], choices=versions.VERSIONS, help="only these")
MATRIX.add_argument(
    "--python",
    action="append",
    default=[],
    metavar="VERSION=PATH",
    help="a Python with this torch, not changed",
)
MATRIX.add_argument("--write", type=Path, metavar="PAGE", help="put the results into this page")
MATRIX.add_argument(
    "--again", action="store_true", help="only what failed in the last run, which keeps what passes now"
)
MATRIX.add_argument(
    "--limit", type=int, default=versions.LIMIT, metavar="SECONDS", help="of each version's tests"
)


@nox.session(name="tests-torch")
@nox.parametrize("torch", [nox.param(each, id=each) for each in versions.VERSIONS])
def tests_torch(session: nox.Session, torch: str) -> None:
    """The contract tests on one torch: `nox -s "tests-torch(2.6.0)"` (`-- --help`; 6 GB each)."""
    args, more = MATRIX.parse_known_args(session.posargs)
    given = dict(each.partition("=")[::2] for each in args.python)
    if torch not in (args.torch or given or versions.VERSIONS):
        session.skip("not asked for")
    if (args.write or args.again) and more:
        session.error(
            "--write and --again exclude pytest's arguments: a page about some of the tests claims too much"
        )
    if args.write:  # a page without a place for results should not cost an hour
        versions.check_page(args.write)
    try:
        run = versions.Run(torch, ROOT / "out" / "versions", again=args.again)
    except ValueError as exc:
        session.error(str(exc))
    if args.again and not run.failed:
        session.skip("nothing failed in its last run")
    python, external = given.get(torch, "python"), torch in given
    needs = [*TEST, "numpy>=1.26,<2" if torch.startswith("2.4.") else "numpy>=1.26"]  # of its time
    packages = session.create_tmp()
    try:
        if external:
            session.run(
                python, "-m", "pip", "install", "--quiet", "--target", packages, *needs, external=True
            )
        else:
            session.install(f"torch=={torch}" if torch.count(".") > 1 else f"torch=={torch}.*", *needs)
        said = session.run(python, "-I", "-W", "ignore", "-c", versions.ASK, silent=True, external=external)
        if not isinstance(said, str):  # --install-only runs nothing
            return
        reason = "" if versions.matches(torch, said) else f"{python} has another torch: {said.strip()}"
    except CommandFailed:  # its lines stand above
        reason = "this torch, or what the tests need, cannot be had"
    if reason:
        outcome = run.missing(reason)
    else:
        env = {**ENV, "PYTHONPATH": os.pathsep.join((packages, ENV["PYTHONPATH"]))}
        began, good = time.monotonic(), True
        try:
            # pytest ends between tests; one that hangs in C is killed.
            bound = ("timeout", "--kill-after=30", str(args.limit + 60))
            session.run(*bound, python, *run.command(more, args.limit), env=env, external=True)
        except CommandFailed:
            good = False
        seconds = time.monotonic() - began
        outcome = run.done(said, seconds, good=good, whole=not more, limit=args.limit)
    if args.write:
        versions.write_page(args.write, versions.columns(ROOT / "out" / "versions", args.write))
    session.log(f"torch {torch}: {outcome.summary()}")
    if not outcome.ok:
        session.error(f"torch {torch}: {outcome.summary()}")


@nox.session
def demo(session: nox.Session) -> None:
    """Worlds that break and heal, live: one worker is killed, one stopped; the others go on (`-- --help`)."""
    install(session, *TORCH, "rich>=13.7")
    session.run("python", "examples/demo.py", *session.posargs, env=ENV)


@nox.session
def example(session: nox.Session) -> None:
    """A program of examples/ with all that it needs: `nox -s example -- rl_weights.py --rounds 3`."""
    names = sorted(path.name for path in (ROOT / "examples").glob("[!_]*.py"))
    name, *args = session.posargs or [""]
    if name not in names:
        session.error(
            f"no example {name!r}. There are {', '.join(names)}. Name one: nox -s example -- NAME [ARGS]."
        )
    more = {"ray_actors.py": CLUSTERS, "llm_serving.py": SERVING}.get(name, ())
    install(session, *TORCH, *GAME, *BENCH, *more)
    session.install(*DIGITS)
    session.run("python", f"examples/{name}", *args, env=ENV)


@nox.session(tags=["ci"])
def docs(session: nox.Session) -> None:
    """The documentation in site/; a link that leads nowhere is an error (`-- serve` shows it live)."""
    session.install(*DOCS)
    # Otherwise the theme prints an advertisement.
    session.run(
        "mkdocs", *(session.posargs or ["build", "--strict"]), env={**ENV, "NO_MKDOCS_2_WARNING": "1"}
    )


@nox.session
def soak(session: nox.Session) -> None:
    """The long forms of the soak tests, five minutes each or more (`-- --soak SECONDS`)."""
    install(session, *TEST, *TORCH)
    args = session.posargs or ["--soak", "300"]
    session.run("python", "-m", "pytest", "tests/contract", "-m", "soak", *args, env=ENV)


@nox.session(name="torch-suite")
def torch_suite(session: nox.Session) -> None:
    """PyTorch's own distributed suite on gloo, in a world beside stock: 0 differences (`-- --help`)."""
    install(session, *TORCH, "expecttest", "hypothesis")
    path = os.pathsep.join((ENV["PYTHONPATH"], str(ROOT / "tests")))
    session.run("python", "-m", "torchsuite", *session.posargs, env={**ENV, "PYTHONPATH": path})


@nox.session
def matrix(session: nox.Session) -> None:
    """Every way NCCL can fail, on every build: docs/nccl-defects.md (`-- --help`; half an hour, 18 GB)."""
    session.install(*TOOLCHAIN)
    path = os.pathsep.join((ENV["PYTHONPATH"], str(ROOT / "tests" / "testbed")))
    session.run("python", "-m", "matrix", *session.posargs, env={**ENV, "PYTHONPATH": path})


@nox.session
def wheel(session: nox.Session) -> None:
    """Wheels in dist/ (`-- DIR`): `m8d`, and for private indexes `multiworld`, which requires it."""
    session.install("hatchling>=1.25")
    folder = str(Path(*session.posargs[:1] or ["dist"]).resolve())
    for project in (ROOT, ROOT / "alias"):
        with session.chdir(project):
            session.run("python", "-m", "hatchling", "build", "-t", "wheel", "-d", folder)


@nox.session(name="build-torch", tags=["ci"])
def build_torch(session: nox.Session) -> None:
    """Official wheel + sources -> patched wheel in out/ (`-- --help` for the options)."""
    session.install(*TOOLCHAIN)
    session.run("python", "-m", "m8d_build", "build", *session.posargs, env=ENV)


@nox.session
def series(session: nox.Session) -> None:
    """Build the other series (`-- 2.6.0`), show their patches at work, record it: tests/series.json."""
    session.install(*TOOLCHAIN, *TEST, "numpy>=1.26")
    for version in session.posargs or ["2.6.0", "2.9.1"]:
        session.run("python", "-m", "m8d_build", "build", "--torch", version, env=ENV)
        tests = ["testbed", "--no-keep", "--torch", "-k", "test_patches"]
        session.run("python", "-m", "m8d_build", *tests, env=ENV)
        session.run("python", "tests/series.py", "record", version)


@nox.session(name="check-wheel", tags=["ci"])
def check_wheel(session: nox.Session) -> None:
    """Install a patched wheel in a fresh environment and probe it (`-- WHEEL`; default: the last built)."""
    session.install(*TOOLCHAIN)
    session.run("python", "-m", "m8d_build", "check", *session.posargs, env=ENV)


@nox.session(tags=["ci"])
def testbed(session: nox.Session) -> None:
    """Real ProcessGroupNCCL without a GPU: the patched wheel last built and an official one (`-- --help`)."""
    session.install(*TOOLCHAIN, *TEST, "numpy>=1.26")
    session.run("python", "-m", "m8d_build", "testbed", *session.posargs, env=ENV)


@nox.session
def bench(session: nox.Session) -> None:
    """Costs beside stock torch.distributed: five minutes, JSON in out/ (`-- --full`, `-- --help`)."""
    install(session, *TOOLCHAIN, *BENCH, *TORCH)
    session.run("python", "-m", "benchmarks", *session.posargs, env=ENV)


@nox.session
def gpu(session: nox.Session) -> None:
    """The NCCL scenarios on this machine's GPUs: docs/hardware.md (`-- --gpu NAME=PYTHON`, `-- --help`)."""
    session.install(*TOOLCHAIN)
    args = [*session.posargs]
    if not {"--gpu", "--help", "-h", "--list", "--page-only"} & {arg.partition("=")[0] for arg in args}:
        session.install("torch==2.14.1", "numpy>=1.26")
        args += ["--gpu", f"stock-2.14.1={session.virtualenv.bin}/python"]
    path = os.pathsep.join([str(ROOT / "tests" / "testbed"), str(ROOT / "tests" / "gpu"), ENV["PYTHONPATH"]])
    # 1 is "no GPU here": whoever asked for hardware must not take that for a pass.
    session.run("python", "-m", "hardware", *args, env={**ENV, "PYTHONPATH": path})


@nox.session
def m8d(session: nox.Session) -> None:
    """Any other command of the toolchain: `nox -s m8d -- verify`."""
    session.install(*TOOLCHAIN)
    session.run("python", "-m", "m8d_build", *session.posargs, env=ENV)
