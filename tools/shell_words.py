"""The commands of a shell block, split into words, and what is wrong with one."""

import itertools
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from install_lines import install_complaint
from repository import ROOT

# Commands that a page may show without further checks.
PLAIN = {"cat", "cd", "export", "git", "head", "ls", "pre-commit", "source", "tail"}


def commands(block: str) -> list[list[str]]:
    """Each command of a shell block as words, without prompts, comments and assignments."""
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line.strip().removeprefix("$ "), comments=True)
        command: list[str] = []
        for word in [*words, "&&"]:
            if word in {"&&", "||", "|", ";", "&"}:
                if command:
                    found.append(command)
                command = []
            elif command or not re.match(r"[A-Z_]+=", word):
                command.append(word)
    return found


def complaint(command: list[str]) -> str:
    """What a reader would stumble over who types this command, or an empty string."""
    match command:
        case ["python3" | "python", "-m", "nox", *words]:
            return _unknown("nox session", _sessions_of(words), sessions())
        case ["python3" | "python", "-m", "pip", "install", *words]:
            return install_complaint(words)
        case ["python3" | "python", "-m", "venv", _]:
            return ""
        case ["python3" | "python", "-m", "pytest", *words]:
            paths = [word for word in words if "/" in word]
            return "".join(f"there is no file {p}" for p in paths if not (ROOT / p).exists())
        case ["python3" | "python", script, *_] if script.endswith(".py"):
            return "" if (ROOT / script).is_file() else f"there is no file {script}"
        case ["pcomm", *words]:
            return _pcomm(words)
        case ["torchrun", *words] if shutil.which("torchrun", path=_binaries()):
            return _pcomm(words[words.index("pcomm") + 1 :]) if "pcomm" in words else ""
        case ["srun", *_, "bash", "-c", script]:
            return next(filter(None, map(complaint, commands(script))), "")
        case ["exec", *words]:
            return complaint(words)
        case [name, *_] if name in PLAIN:
            return ""
    return f"no check knows the command {command[0]!r}"


@cache
def sessions() -> frozenset[str]:
    """The names of the nox sessions, read from noxfile.py."""
    text = (ROOT / "noxfile.py").read_text()
    return frozenset(re.findall(r"^@nox\.session.*\ndef (\w+)", text, flags=re.MULTILINE))


@cache
def help_text(*words: str) -> str:
    """What `pcomm WORDS --help` prints; empty where the command fails."""
    command = [str(Path(_binaries()) / "pcomm"), *words, "--help"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return answer.stdout if answer.returncode == 0 else ""


def _pcomm(words: list[str]) -> str:
    # A benchmark has options of its own, like a subcommand.
    depth = 2 if words[:1] == ["bench"] else 1
    subcommand = list(itertools.takewhile(lambda word: not word.startswith("-"), words[:depth]))
    text = help_text(*subcommand)
    if not text:
        return f"`pcomm {' '.join(subcommand)} --help` fails"
    known = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text))
    return _unknown("option", {word.split("=")[0] for word in words if word.startswith("-")}, known)


def _sessions_of(words: list[str]) -> set[str]:
    before_options = words[: words.index("--")] if "--" in words else words
    return {word for word in before_options if not word.startswith("-")}


def _binaries() -> str:
    return str(Path(sys.executable).parent)


def _unknown(kind: str, used: set[str], known: set[str] | frozenset[str]) -> str:
    strange = sorted(used - known)
    return f"no such {kind}: {', '.join(strange)}" if strange else ""
