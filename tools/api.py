"""Compare the faces of the packages with the names and signatures in tools/api.txt.

    python tools/api.py           # says which names changed, and fails if any did
    python tools/api.py --save    # writes the list again

`nox -s api` runs it. Sources are read by griffe and not run, so neither torch nor a tag of git is
needed. A line is a name of a face, or a public member of a class that a face shows; members that a
class inherits from another of ours are listed with it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator

import griffe

from faces import faces, homes
from repository import PACKAGES, ROOT

LIST = ROOT / "tools" / "api.txt"

_NAME = re.compile(r"[\w.]+")


def signatures() -> list[str]:
    """A line for each name of each face and each public member of its classes."""
    loader = griffe.GriffeLoader(search_paths=[package / "src" for package in PACKAGES])
    loader.load("pcomm")
    lines: list[str] = []
    for face, path in faces().items():
        for name, home in homes(path).items():
            lines += described(loader.modules_collection[home][name], f"{face}.{name}")
    return sorted(lines)


def described(found: griffe.Object | griffe.Alias, name: str) -> Iterator[str]:
    """The line of one name, and those of its members where it is a class."""
    yield line(found, name)
    if found.is_class:
        for member in found.all_members.values():
            if member.is_public and not member.name.startswith("_"):
                # What is inherited is an alias, whose signature lacks the result.
                target = member.final_target if isinstance(member, griffe.Alias) else member
                yield line(target, f"{name}.{member.name}")


def line(found: griffe.Object | griffe.Alias, name: str) -> str:
    """One name with what a caller sees: parameters and result, bases, or the type of a value."""
    if isinstance(found, griffe.Attribute):
        return f"{name}: {found.annotation}" if found.annotation else name
    assert isinstance(found, griffe.Class | griffe.Function), f"{name} is a {found.kind}"
    # Classes that are not made by callers, such as protocols, have no signature.
    return str(found.signature(name=name)) or name


def changes(before: Iterable[str], now: Iterable[str]) -> list[str]:
    """What differs between two lists of lines, a sentence for each name."""
    old = {_name(text): text for text in before}
    new = {_name(text): text for text in now}
    found = [f"{name} is gone" for name in old.keys() - new.keys()]
    found += [f"{name} is new" for name in new.keys() - old.keys()]
    for name in old.keys() & new.keys():
        if old[name] != new[name]:
            found.append(f"{name} changed\n    from {old[name]}\n    to   {new[name]}")
    return sorted(found)


def _name(text: str) -> str:
    match = _NAME.match(text)
    assert match is not None, f"a line without a name: {text!r}"
    return match[0]


def main(words: list[str]) -> int:
    """Print what changed; the exit status says whether anything did."""
    now = signatures()
    if "--save" in words:
        LIST.write_text("\n".join(now) + "\n")
        return 0
    found = changes(LIST.read_text().splitlines(), now)
    print("\n".join(found) or f"{len(now)} names of {len(faces())} faces are as in tools/api.txt")
    if found:
        print(
            "\nThe faces differ from tools/api.txt. If that is meant, write the list again with "
            "`python3 -m nox -s api -- --save` and say it in the CHANGELOG of the package."
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
