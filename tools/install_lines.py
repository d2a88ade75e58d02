"""The `pip install` commands of a page, and what would go wrong, or astray, with one.

A word that is no path is the name of a package on the index, where any account may register a name.
So folders of this repository are written `./FOLDER`, with everything of this repository that they
need in the same command, and other names come from a list.
"""

import re
import shlex

from packaging.requirements import Requirement

from repository import PACKAGES, ROOT, project

# What pages may have fetched from the index.
FROM_INDEX = {"matplotlib", "nox", "openai", "pre-commit", "transformers"}
# Options that stand alone; others would have to be understood first.
OPTIONS = {"-e", "--editable", "--no-build-isolation", "--upgrade", "-U"}

_COMMAND = re.compile(r"\bpip3? install +(?P<words>[^`\n&|;]+)")


def install_lines(page: str) -> list[list[str]]:
    """The words after `pip install`, of each such command in the blocks and lines of a page."""
    text = page.replace("\\\n", " ")
    return [shlex.split(found["words"], comments=True) for found in _COMMAND.finditer(text)]


def install_complaint(words: list[str]) -> str:
    """What is wrong with the words of a `pip install`, or an empty string."""
    asked: dict[str, str] = {}
    for word in words:
        if word.startswith("-"):
            if word not in OPTIONS:
                return f"no check knows the option {word}"
            continue
        folder, extras = split_extras(word)
        if word.startswith("./"):
            known = {f"./{path.relative_to(ROOT).as_posix()}": path for path in PACKAGES}
            if folder not in known:
                return f"no such folder with a package: {folder}"
            missing = extras - set(project(known[folder]).get("optional-dependencies", {}))
            if missing:
                return f"{folder} has no extra {', '.join(sorted(missing))}"
            asked[project(known[folder])["name"]] = folder
        elif "/" in word or (ROOT / folder).exists():
            return f"write ./{word}: the index may have a package of that name"
        elif Requirement(word).name not in FROM_INDEX:
            return f"{word} would come from the index"
    return _missing_sibling(asked)


def split_extras(word: str) -> tuple[str, set[str]]:
    """A folder and its extras: `./integration[parquet]` is `./integration` and `parquet`."""
    folder, _, rest = word.partition("[")
    return folder, {extra.strip() for extra in rest.rstrip("]").split(",") if extra.strip()}


def _missing_sibling(asked: dict[str, str]) -> str:
    """A package of this repository that pip would look for on the index."""
    own = {project(path)["name"]: project(path) for path in PACKAGES}
    for name, folder in asked.items():
        needed = {Requirement(text).name for text in own[name].get("dependencies", [])}
        for sibling in sorted(needed & set(own) - set(asked)):
            return f"{folder} needs {sibling}, which would come from the index"
    return ""
