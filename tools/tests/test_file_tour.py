"""Compares the file tour of the README with the tree, in both directions."""

from fnmatch import fnmatchcase

from code_blocks import code_blocks
from repository import ROOT, folders

DEPTH = 3


def tour() -> list[str]:
    """The folders that the README's tour names; `*` stands for any name at its level."""
    section = (ROOT / "README.md").read_text().split("## The files\n")[1].split("\n## ")[0]
    lines = [line for block in code_blocks(section) for line in block.text.splitlines()]
    return [line.split()[0].rstrip("/") for line in lines if line.split()[0].endswith("/")]


def covers(pattern: str, folder: str) -> bool:
    ours, theirs = pattern.split("/"), folder.split("/")
    return len(ours) == len(theirs) and all(map(fnmatchcase, theirs, ours))


def test_every_folder_is_named_in_the_tour():
    missing = [f for f in folders(DEPTH) if not any(covers(entry, f) for entry in tour())]
    assert missing == []


def test_every_folder_of_the_tour_is_in_the_tree():
    tree = list(folders(max(entry.count("/") for entry in tour()) + 1))
    assert [entry for entry in tour() if not any(covers(entry, f) for f in tree)] == []


def test_a_star_covers_one_level():
    assert covers("packages/*/src", "packages/pcomm-core/src")
    assert not covers("packages/*", "packages/pcomm-core/src")
