"""The pages of the reference: one a package, with every name of its face and of its rooms' faces.

A name that several faces show is described under the first of them, to which the others link.
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
    """One face: its docstring, what was not described before, and links to what was."""
    stub = faces()[module]
    paths = {name: f"{home}.{name}" for name, home in sorted(homes(stub).items())}
    lines = ["", f"## {module}", "", summary(stub)]
    before = {n: p for n, p in paths.items() if p in described or p.startswith(f"{ERRORS}.")}
    for name, path in paths.items():
        if name not in before:
            lines += ["", f"::: {path}"]
            described.add(path)
    if before:
        links = ", ".join(f"[`{name}`][{path}]" for name, path in before.items())
        lines += ["", f"And from elsewhere: {links}."]
    return lines
