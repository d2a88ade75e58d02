import importlib
import subprocess
import sys
import zipfile

import pytest

from pcomm.core.testing.programs import PATIENCE_S, scaled_s
from repository import PACKAGES, module_name, project

each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)


@each_package
def test_namespace_folder_holds_one_module_and_no_file(package):
    # One stray pcomm/__init__.py would hide all other packages.
    inside = [p.name for p in (package / "src" / "pcomm").iterdir() if p.name != "__pycache__"]
    assert inside == [module_name(package).removeprefix("pcomm.")]


@each_package
def test_wheel_is_typed_licensed_and_leaves_the_namespace_open(package, tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    limit_s = scaled_s(PATIENCE_S)
    subprocess.run(command, cwd=package, check=True, capture_output=True, timeout=limit_s)
    (wheel,) = tmp_path.iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    folder = module_name(package).replace(".", "/")
    assert f"{folder}/__init__.py" in names
    assert f"{folder}/py.typed" in names
    # The names of a face stand in its stub, which is read when the package is imported.
    source = package / "src"
    assert {p.relative_to(source).as_posix() for p in source.rglob("*.pyi")} <= {*names}
    assert "pcomm/__init__.py" not in names
    assert "pcomm/py.typed" not in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    outside = [n for n in names if not n.startswith((f"{folder}/", wheel.name.split("-")[0]))]
    assert outside == []


@each_package
def test_version_is_the_same_in_all_three_places(package):
    version = project(package)["version"]
    assert importlib.import_module(module_name(package)).__version__ == version
    assert f"\n## {version}\n" in (package / "CHANGELOG.md").read_text()
