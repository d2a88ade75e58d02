"""Compares what the README says of files, rooms and folders with the tree, in both directions."""

import re
from fnmatch import fnmatchcase

from code_blocks import code_blocks
from repository import PACKAGES, ROOT, folders, module_name

DEPTH = 3


def section(title: str) -> str:
    return (ROOT / "README.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]


def block_lines(title: str) -> list[str]:
    return [line for block in code_blocks(section(title)) for line in block.text.splitlines()]


def tour() -> list[str]:
    """The folders that the README's tour names; `*` stands for any name at its level."""
    first_words = [line.split()[0] for line in block_lines("The folders")]
    return [word.rstrip("/") for word in first_words if word.endswith("/")]


def rooms() -> dict[str, list[str]]:
    """The rooms that the README names, by the last word of their package's module."""
    found: dict[str, list[str]] = {}
    for line in block_lines("The rooms"):
        if not line.startswith(" "):
            found[line.split()[0]] = own = []
        else:
            own.append(line.split()[0].rstrip("/"))
    return found


def rooms_in_tree() -> dict[str, list[str]]:
    found = {}
    for package in PACKAGES:
        name = module_name(package).split(".")[1]
        inside = (package / "src" / "pcomm" / name).glob("*/__init__.py")
        found[name] = sorted(path.parent.name for path in inside)
    return found


def covers(pattern: str, folder: str) -> bool:
    ours, theirs = pattern.split("/"), folder.split("/")
    return len(ours) == len(theirs) and all(map(fnmatchcase, theirs, ours))


def test_every_folder_is_named_in_the_tour():
    missing = [f for f in folders(DEPTH) if not any(covers(entry, f) for entry in tour())]
    assert missing == []


def test_every_folder_of_the_tour_is_in_the_tree():
    tree = list(folders(max(entry.count("/") for entry in tour()) + 1))
    assert [entry for entry in tour() if not any(covers(entry, f) for f in tree)] == []


def test_the_rooms_are_those_of_the_tree():
    assert rooms() == rooms_in_tree()


def test_the_six_files_to_read_are_there():
    text = section("Read in this order")
    core, integration = re.findall(r"`((?:packages|integration)/[\w/-]+/)`", text)
    files = re.findall(r"^\d\. `([\w/]+\.py)`: ", text, flags=re.MULTILINE)
    assert len(files) == 6
    places = [*(core + file for file in files[:5]), integration + files[5]]
    assert [place for place in places if not (ROOT / place).is_file()] == []


def test_a_star_covers_one_level():
    assert covers("packages/*/src", "packages/pcomm-core/src")
    assert not covers("packages/*", "packages/pcomm-core/src")
