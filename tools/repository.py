"""The repository as the tools see it: its packages, their sources, and what is not part of it."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [*sorted((ROOT / "packages").glob("pcomm-*")), ROOT / "integration"]

# What commands write at the root; hidden folders belong to tools as well.
WRITTEN = {"build", "dist", "runs", "site"}


def project(package: Path) -> dict[str, Any]:
    """The `[project]` table of a package's pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return table


def module_name(package: Path) -> str:
    """What users of a package import: `pcomm.gdn_cp`."""
    name: str = project(package)["name"]
    return "pcomm." + name.removeprefix("pcomm-").replace("-", "_")


def folders(depth: int) -> Iterator[str]:
    """All folders of the tree down to a depth, as `packages/pcomm-core`; none that is written."""
    pending = [ROOT]
    while pending:
        folder = pending.pop()
        for child in sorted(folder.iterdir()):
            name = child.relative_to(ROOT).as_posix()
            if not child.is_dir() or name in WRITTEN or child.name.startswith("."):
                continue
            # Python leaves its caches behind in folders that are gone from the tree.
            if any(p.is_file() and p.parent.name != "__pycache__" for p in child.rglob("*")):
                yield name
                if name.count("/") + 1 < depth:
                    pending.append(child)


def sources() -> list[Path]:
    """Every Python file of the packages that is part of a wheel."""
    return sorted(path for package in PACKAGES for path in (package / "src").rglob("*.py"))


def pages() -> list[Path]:
    """Every README, and every page of the documentation."""
    readmes = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(p / "README.md" for p in PACKAGES)]
    return [*readmes, *sorted((ROOT / "docs").rglob("*.md"))]
