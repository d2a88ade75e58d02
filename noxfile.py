"""Every task of the repository: `python3 -m nox -l` lists them, and CI runs nothing else.

Plain `venv` and pip, with the versions in `constraints.txt`. Whatever runs our code shares one
environment (session `environment`), because torch is large; `isolated` has a second one, where the
distributions are installed the way a user gets them. An installation is repeated only after a
`pyproject.toml` or `constraints.txt` has changed.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    found = ".".join(map(str, sys.version_info[:3]))
    sys.exit(
        f"noxfile.py: this is Python {found} ({sys.executable})\n"
        "pcomm needs Python 3.11 or newer, and its sessions use the Python that runs nox.\n"
        "Install nox for a newer one, for example: "
        "python3.12 -m pip install nox && python3.12 -m nox -s train"
    )

import hashlib
import os
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nox
from packaging.requirements import Requirement

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests"]

ROOT = Path(__file__).parent
WATCHED = sys.stdout.isatty()
CONSTRAINTS = ROOT / "constraints.txt"
SETTINGS = nox.project.load_toml("pyproject.toml")
# Lower floors first: pcomm-core, the features, then integration.
CORE = ROOT / "packages" / "pcomm-core"
FEATURES = sorted(path for path in (ROOT / "packages").glob("pcomm-*") if path != CORE)
PACKAGES = [CORE, *FEATURES, ROOT / "integration"]
# What `isolated` runs of a package beside its unit tests: ranks are started from the wheel, too.
WITH_WHEELS = {
    "pcomm-core": ["ranks/test_collectives.py", "ranks/test_doctor_command.py"],
    "pcomm-fsdp": ["ranks/test_equal_to_one_process.py"],
    "pcomm-gdn-cp": ["ranks/test_plan_on_ranks.py"],
    "pcomm-ntp": ["ranks/test_reshard_on_ranks.py"],
    "pcomm-nvls": ["ranks/test_all_gather_into_tensor.py"],
    "pcomm-integration": ["e2e/test_command_line.py"],
}
# What `oldest` and `newest` run: torch's collectives, what each package does with torch, every
# library that integration is made from, the names of CUDA and NCCL in builds of torch that have
# them, and Triton's launcher. Transformers asks for newer ones, so no test here has it.
AT_BOTH_ENDS = [
    "packages/pcomm-core/tests/ranks/test_collectives.py",
    "packages/pcomm-core/tests/ranks/test_world.py",
    "packages/pcomm-fsdp/tests/ranks/test_equal_to_one_process.py",
    "packages/pcomm-gdn-cp/tests/ranks/test_plan_on_ranks.py",
    "packages/pcomm-inference/tests/unit/test_engine.py",
    "packages/pcomm-inference/tests/unit/test_structured_output.py",
    "packages/pcomm-ntp/tests/ranks/test_reshard_on_ranks.py",
    "packages/pcomm-nvls/tests/ranks/test_all_gather_into_tensor.py",
    "packages/pcomm-nvls/tests/unit/test_launches.py",
    "tools/tests/test_cuda_names.py",
    "integration/tests/e2e/test_command_line.py",
    "integration/tests/e2e/test_serve_api.py",
]
SOURCE_PATH = os.pathsep.join(str(package / "src") for package in PACKAGES)


@nox.session
def environment(session: nox.Session) -> None:
    """Install torch and all packages in editable form: what training, chat and serving need."""

    def install() -> None:
        pip_install(session, *group("editable"))
        # hatchling is there now, so no package needs a build environment of its own.
        members = editable({path: ["serve"] * (path.name == "integration") for path in PACKAGES})
        pip_install(session, "--no-build-isolation", *members)

    install_once(session, install)


@nox.session(venv_backend="none", requires=["environment"])
def workshop(session: nox.Session) -> None:
    """Add to that environment the tools, and what tests and benchmarks compare with."""

    def install() -> None:
        asked = sorted({line for path in PACKAGES for line in extra(path, "test")})
        words = ["--constraint", str(CONSTRAINTS), *group("run"), *asked]
        run_in_environment(session, "python", "-m", "pip", "install", *words, silent=not WATCHED)

    install_once(session, install, shared_environment(session) / "workshop-for.txt")


@nox.session(venv_backend="none", requires=["environment"])
def train(session: nox.Session) -> None:
    """Train the quick-start GPT on two CPU ranks; results go to runs/quickstart."""
    arguments = ["--config", "integration/configs/quickstart.toml", "--ranks", "2"]
    run_in_environment(
        session, "pcomm", "train", *arguments, "--out", "runs/quickstart", *session.posargs
    )


@nox.session(venv_backend="none", requires=["workshop"])
def tests(session: nox.Session) -> None:
    """Run every test, in three processes; words after `--` go to pytest, such as `-n 0 --pdb`."""
    # One more than the cores of a small machine, for while ranks wait for each other. Tests of a
    # file stay together: what its fixtures make is shared. `conftest.py` says in which order the
    # files begin; by itself xdist begins those of few tests, the long ones, last.
    at_once = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
    run_in_environment(session, "python", "-m", "pytest", *at_once, *session.posargs)


@nox.session(venv_backend="none", requires=["workshop"])
def soak(session: nox.Session) -> None:
    """Run the long forms of tests, which `tests` leaves out; words after `--` go to pytest."""
    chosen = ["-m", "soak", "--timeout", "14400"]
    run_in_environment(session, "python", "-m", "pytest", *chosen, *session.posargs)


@nox.session(venv_backend="none", requires=["workshop"])
def types(session: nox.Session) -> None:
    """Check the types of all sources, strictly."""
    run_in_environment(session, "python", "-m", "mypy", *session.posargs)


@nox.session(venv_backend="none", requires=["workshop"])
def bench(session: nox.Session) -> None:
    """Run the benchmarks, or those named after `--`; `-- --save` keeps the rows in docs/."""
    found = {
        path.stem: (package, path)
        for package in PACKAGES
        for path in sorted(package.glob("benchmarks/*.py"))
        if not path.name.startswith("_")
    }
    chosen = [word for word in session.posargs if word != "--save"]
    if unknown := set(chosen) - set(found):
        session.error(f"bench: {sorted(unknown)} are not among the benchmarks {list(found)}")
    save = "--save" in session.posargs
    for name in chosen or found:
        package, path = found[name]
        rows = f"docs/benchmarks/{module_of(package).removeprefix('pcomm.')}.csv"
        options = ["--csv", rows] if save else []
        # A run of all includes those that need a GPU; they say what they miss, and end with 77.
        passes = [0] if chosen else [0, 77]
        script = str(path.relative_to(ROOT))
        run_in_environment(session, "python", script, *options, success_codes=passes)
    if save:
        run_in_environment(session, "python", "tools/reference_pages.py")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format; `-- --fix` repairs what can be repaired."""
    install_once(session, lambda: pip_install(session, *group("lint")))
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")


@nox.session
def layers(session: nox.Session) -> None:
    """Check that imports go down: integration, features, core."""
    install_once(session, lambda: pip_install(session, *group("layers")))
    # import-linter reads the sources without running them, so torch is not needed.
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": SOURCE_PATH})


@nox.session
def api(session: nox.Session) -> None:
    """Compare the faces of the packages with tools/api.txt; `-- --save` writes the list again."""
    install_once(session, lambda: pip_install(session, *group("api")))
    session.run("python", "tools/api.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/, where any warning is an error, and look at its pages."""
    install_once(session, lambda: pip_install(session, *group("docs")))
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", "build", "--strict", *session.posargs, env=quiet)
    if not session.posargs:
        looked_at = {"PCOMM_SITE": str(ROOT / "site")}
        session.run("python", "-m", "pytest", "-q", "tools/tests/test_site.py", env=looked_at)


@nox.session
def build(session: nox.Session) -> None:
    """Build the wheel and the source archive of every package into dist/."""
    install_once(session, lambda: pip_install(session, *group("build")))
    build_into_dist(session)


@nox.session
def isolated(session: nox.Session) -> None:
    """Install each wheel alone, away from the sources, and run some of its tests.

    What a wheel lacks, or asks for and does not declare, shows when a test imports it or what it
    tests; so all are collected, and one of each file of unit tests is run, with some on ranks. What
    the others find in numbers does not depend on where the package was installed.
    """
    install_once(session, lambda: pip_install(session, *group("build"), "torch"))
    build_into_dist(session)
    for package in PACKAGES:
        run_tests_alone(session, package)


@nox.session
def oldest(session: nox.Session) -> None:
    """Run some tests with the oldest versions that the packages promise to work with."""
    lowest = Path(session.create_tmp()) / "oldest.txt"
    lowest.write_text("\n".join(sorted(oldest_versions())))
    test_one_end(session, "--constraint", str(lowest))


@nox.session
def newest(session: nox.Session) -> None:
    """Run the same tests with the newest versions that pip finds."""
    test_one_end(session, "--upgrade", "--upgrade-strategy", "eager")


@nox.session(python=["3.11", "3.12", "3.13"], requires=["build"])
def release(session: nox.Session) -> None:
    """Install the wheels alone, import every face, and train three steps on two ranks."""
    session.run("python", "-m", "pip", "uninstall", "-qy", *map(name_of, PACKAGES), silent=True)
    pip_install(session, *(str(wheel_of(path)) for path in PACKAGES))
    away = Path(session.create_tmp()).resolve()
    check = ROOT / "tools" / "check_installed_alone.py"
    options = ["--ranks", "2", "--set", "train.steps=3", "--set", "train.warmup_steps=1"]
    options += ["--set", "data.vocabulary=320", "--set", "sample.max_tokens=8"]
    with session.chdir(away):
        session.run("python", "-P", str(check), *map(module_of, PACKAGES))
        session.run("pcomm", "train", *options, "--restart", "--out", "run", *session.posargs)


def run_tests_alone(session: nox.Session, package: Path) -> None:
    """Swap the wheels of the one environment, so that torch is not installed seven times over."""
    session.run("python", "-m", "pip", "uninstall", "-qy", *map(name_of, PACKAGES), silent=True)
    wanted = [package, *siblings_of(package)]
    wheels = [str(wheel_of(path)) for path in wanted]
    # Named as files, so that nothing of the same name can come from an index.
    pip_install(session, f"{wheels[0]}[test]", *wheels[1:])

    away = Path(session.create_tmp()) / package.name
    shutil.rmtree(away, ignore_errors=True)
    shutil.copytree(package / "tests", away / "tests")
    # What tests of one package import from beside another one's: never what is in a wheel.
    beside = away / "beside"
    for path in PACKAGES:
        for folder in (*path.glob("tests/*_support"), *path.glob("benchmarks/*_bench")):
            shutil.copytree(folder, beside / folder.name)
    absent = [path for path in PACKAGES if path not in wanted]
    check = ROOT / "tools" / "check_installed_alone.py"
    settings = SETTINGS["tool"]["pytest"]["ini_options"]
    markers = "markers=" + "\n".join(settings["markers"])
    chosen = ["tests/unit", *(f"tests/{words}" for words in WITH_WHEELS.get(name_of(package), ()))]
    with session.chdir(away):
        names = [*map(module_of, wanted), "--absent", *map(module_of, absent)]
        session.run("python", "-P", str(check), *names)
        pytest = ["-m", "pytest", "-c", os.devnull, "--rootdir", ".", "--import-mode=importlib"]
        pytest += ["--override-ini", markers, "--strict-markers"]
        # In one process: to import all tests takes longer than to run the few that are chosen.
        options = ["-q", "-m", "not soak", "-p", "one_case_each"]
        options += ["--hypothesis-profile", "one_case_each", f"--timeout={settings['timeout']}"]
        plugins = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tools"), str(beside)])}
        # Every test is imported, also those that only the session `tests` runs.
        options += [word for place in chosen for word in ("--only-in", place)]
        options += ["--one-of-each-file", "tests/unit"]
        session.run("python", "-P", *pytest, *options, "tests", env=plugins)


def test_one_end(session: nox.Session, *versions: str) -> None:
    """Run tests of every package with some versions; words after `--` replace those tests."""
    wanted = editable({path: extras(path) for path in PACKAGES})
    tools = ["hypothesis", "jsonschema", "openai", "pytest", "pytest-timeout", "schemathesis"]
    session.install(*versions, *tools, *wanted, silent=not WATCHED)
    session.run("python", "-m", "pip", "list", "--exclude-editable")
    # Old libraries warn of new Pythons, and new ones of what they will take away.
    options = ["-q", "-W", "default", "-p", "one_case_each", "--hypothesis-profile"]
    chosen = session.posargs or AT_BOTH_ENDS
    session.run("python", "-m", "pytest", *options, "one_case_each", *chosen)


def editable(wanted: Mapping[Path, Sequence[str]]) -> list[str]:
    """Words for pip that install packages in editable form, each with some extras."""
    places = [
        f"{path}[{','.join(names)}]" if names else str(path) for path, names in wanted.items()
    ]
    return [word for place in places for word in ("--editable", place)]


def oldest_versions() -> set[str]:
    """Each library of others that a package asks for, at the lower end of its range."""
    lines = [line for path in PACKAGES for line in project(path)["dependencies"]]
    lines += [line for path in PACKAGES for name in extras(path) for line in extra(path, name)]
    asked = [Requirement(line) for line in lines]
    ends = {one.name: [s.version for s in one.specifier if s.operator == ">="] for one in asked}
    ours = {name_of(path) for path in PACKAGES}
    return {f"{name}=={low}" for name, (low,) in ends.items() if name not in ours}


def build_into_dist(session: nox.Session) -> None:
    """Build all distributions into a fresh dist/ with the hatchling that is installed."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for package in PACKAGES:
        outdir = ["--outdir", str(ROOT / "dist"), str(package)]
        session.run("python", "-m", "build", "--no-isolation", *outdir, silent=True)
    session.run("python", "tools/check_metadata.py", "dist")


def install_once(
    session: nox.Session, install: Callable[[], None], stamp: Path | None = None
) -> None:
    """Call `install` unless this environment was filled for the same requirements before."""
    stamp = stamp or Path(session.virtualenv.location) / "installed-for.txt"
    digest = hashlib.sha256(sys.version.encode())
    for path in (CONSTRAINTS, ROOT / "pyproject.toml", *(p / "pyproject.toml" for p in PACKAGES)):
        digest.update(path.read_bytes())
    wanted = digest.hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        install()
        stamp.write_text(wanted)


def pip_install(session: nox.Session, *words: str) -> None:
    """Install under the constraints, with pip's progress on a terminal."""
    session.install("--constraint", str(CONSTRAINTS), *words, silent=not WATCHED)


def shared_environment(session: nox.Session) -> Path:
    """The folder of the environment that sessions share."""
    return session.cache_dir.parent / "environment"


def run_in_environment(
    session: nox.Session,
    command: str,
    *words: str,
    success_codes: Sequence[int] = (0,),
    silent: bool = False,
) -> None:
    """Run a command of the shared environment, whatever else is on the path."""
    binaries = shared_environment(session) / ("Scripts" if os.name == "nt" else "bin")
    path = os.pathsep.join([str(binaries), os.environ["PATH"]])
    # Tests start hundreds of processes, and each would compile the sources anew.
    variables = {"PATH": path, "PYTHONDONTWRITEBYTECODE": None}
    session.run(
        str(binaries / command),
        *words,
        external=True,
        env=variables,
        success_codes=success_codes,
        silent=silent,
    )


def group(name: str) -> Sequence[str]:
    """The requirements of a dependency group of the root pyproject.toml."""
    return nox.project.dependency_groups(SETTINGS, name)


def project(package: Path) -> dict[str, Any]:
    """The `[project]` table of a package."""
    table: dict[str, Any] = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return table


def name_of(package: Path) -> str:
    """The distribution in a folder: `pcomm-core`."""
    return str(project(package)["name"])


def extras(package: Path) -> list[str]:
    """Extras of a package for users; CUDA 12 is left to those who have it."""
    return sorted(set(project(package).get("optional-dependencies", {})) - {"cu12", "test"})


def extra(package: Path, name: str) -> list[str]:
    """The requirements of an extra of a package."""
    return list(project(package)["optional-dependencies"].get(name, ()))


def module_of(package: Path) -> str:
    """What a package's users import: `pcomm.gdn_cp`."""
    return "pcomm." + name_of(package).removeprefix("pcomm-").replace("-", "_")


def wheel_of(package: Path) -> Path:
    """The wheel that `build_into_dist` made of a package."""
    return next((ROOT / "dist").glob(name_of(package).replace("-", "_") + "-*.whl"))


def siblings_of(package: Path) -> list[Path]:
    """The packages of this repository that a package asks for."""
    asked = {Requirement(line).name for line in project(package)["dependencies"]}
    return [path for path in PACKAGES if name_of(path) in asked]
