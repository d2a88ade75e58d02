"""Check what the archives of a release say of themselves.

    python tools/check_metadata.py dist

`nox -s build` runs it on what it has made: an index refuses an archive whose metadata are not valid
after its version was announced, and a link of a README that leads nowhere stays there.
"""

import argparse
import sys
import tarfile
import zipfile
from collections import defaultdict
from pathlib import Path

from packaging.metadata import Metadata


def complaints(folder: Path) -> list[str]:
    """What is wrong with the archives of a folder, a sentence each."""
    found = []
    texts: dict[str, dict[str, bytes]] = defaultdict(dict)
    for archive in sorted(folder.iterdir()):
        kind = "wheel" if archive.suffix == ".whl" else "sdist"
        texts[archive.name.removesuffix(".tar.gz").split("-")[0]][kind] = metadata_of(archive)
    for name, of_kind in texts.items():
        if len(set(of_kind.values())) != 1 or set(of_kind) != {"sdist", "wheel"}:
            found.append(f"{name}: wheel and source archive are not a pair with the same metadata.")
        for kind, text in of_kind.items():
            found += [f"{name}, {kind}: {wrong}" for wrong in wrong_with(text)]
    return found or ([] if texts else [f"{folder} has no archives."])


def metadata_of(archive: Path) -> bytes:
    """The core metadata of a wheel or of a source archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
            return wheel.read(name)
    with tarfile.open(archive) as source:
        file = source.extractfile(f"{archive.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert file is not None
        return file.read()


def wrong_with(text: bytes) -> list[str]:
    """What is invalid or missing in one file of metadata."""
    try:
        read = Metadata.from_email(text, validate=True)
    except ExceptionGroup as errors:
        return [str(error) for error in errors.exceptions]
    wanted = {
        "a summary": read.summary,
        "a description in Markdown": read.description
        and read.description_content_type == "text/markdown",
        "a licence expression": read.license_expression,
        "a licence file": read.license_files,
        "requires-python": read.requires_python,
        "Typing :: Typed": "Typing :: Typed" in (read.classifiers or ()),
    }
    return [f"{what} is missing." for what, value in wanted.items() if not value]


def main(words: list[str]) -> int:
    """Print the complaints; the exit status says whether there were any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of wheels and source archives")
    folder = parser.parse_args(words).folder
    found = complaints(folder)
    print("\n".join(found) or f"{len(list(folder.iterdir()))} archives say what they should")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
