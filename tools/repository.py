"""The repository as the tools see it: its packages, their sources and its pages."""

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [*sorted((ROOT / "packages").glob("pcomm-*")), ROOT / "integration"]


def project(package: Path) -> dict[str, Any]:
    """The `[project]` table of a package's pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return table


def module_name(package: Path) -> str:
    """What users of a package import: `pcomm.gdn_cp`."""
    name: str = project(package)["name"]
    return "pcomm." + name.removeprefix("pcomm-").replace("-", "_")


def sources() -> list[Path]:
    """Every Python file of the packages that is part of a wheel."""
    return sorted(path for package in PACKAGES for path in (package / "src").rglob("*.py"))


def pages() -> list[Path]:
    """Every README, and every page of the documentation."""
    readmes = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(p / "README.md" for p in PACKAGES)]
    return [*readmes, *sorted((ROOT / "docs").rglob("*.md"))]
