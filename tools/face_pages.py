"""The pages of the reference: one a package, with every name of its face and of its rooms' faces.

A table for each face links its names to their descriptions and says which module defines them. A
name that several faces show is described under the first of them.
"""

from __future__ import annotations

from faces import ERRORS, faces, homes, summary


def face_pages() -> dict[str, str]:
    """The text of each page by its name under docs/."""
    packages = sorted({".".join(module.split(".")[:2]) for module in faces()})
    return {f"reference/{name.split('.')[1]}.md": page(name) for name in packages}


def page(package: str) -> str:
    """The reference of one package: its face if it has one, those of its rooms, and its errors."""
    shown = [m for m in faces() if m == package or m.startswith(f"{package}.")]
    described: set[str] = set()
    lines = [f"# The names of {package}"]
    for module in shown:
        lines += _section(module, described)
    if ERRORS.startswith(f"{package}."):
        lines += ["", f"## {ERRORS}", "", f"::: {ERRORS}"]
        lines += ["    options:", "      show_root_heading: false"]
    return "\n".join(lines) + "\n"


def _section(module: str, described: set[str]) -> list[str]:
    """One face: its docstring, a table of its names, and what was not described before."""
    stub = faces()[module]
    paths = {name: f"{home}.{name}" for name, home in sorted(homes(stub).items())}
    lines = ["", f"## {module}", "", summary(stub), "", "| name | defined in |", "|---|---|"]
    for name, path in paths.items():
        lines.append(f"| [`{name}`][{path}] | `{path.removesuffix(f'.{name}')}` |")
    for path in paths.values():
        if path not in described and not path.startswith(f"{ERRORS}."):
            lines += ["", f"::: {path}"]
            described.add(path)
    return lines
