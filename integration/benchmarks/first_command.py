"""What `python3 -m nox -s train` installs before it trains: megabytes and time of the processor.

    python integration/benchmarks/first_command.py --csv FILE

A clone of this checkout gets an environment of its own, as on a machine that has only Python. The
distributions are then fetched once more into a folder, to count their bytes.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from core_bench.rows import Row, row
from core_bench.runner import run_benchmark

HERE, NAME = Path(__file__).parents[2], "first_command"


def measure() -> Sequence[Row]:
    """Install, and count."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    environment["PIP_NO_CACHE_DIR"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        clone, fetched = Path(folder, "clone"), Path(folder, "fetched")

        def run(*words: object) -> str:
            command = [str(word) for word in words]
            return subprocess.check_output(command, cwd=clone, env=environment, text=True)

        subprocess.run(["git", "clone", "--quiet", HERE, clone], check=True)
        begin = _processor_s()
        run(sys.executable, "-m", "venv", "nox")
        run("nox/bin/python", "-m", "pip", "install", "nox")
        run("nox/bin/python", "-m", "nox", "-s", "environment")
        seconds = _processor_s() - begin
        python = clone / ".nox" / "environment" / "bin" / "python"
        Path(folder, "all.txt").write_text(run(python, "-m", "pip", "freeze", "--exclude-editable"))
        download = (python, "-m", "pip", "download", "--no-deps", "--dest", fetched)
        run(*download, "--requirement", Path(folder, "all.txt"))
        return [
            row(NAME, "fetched", _bytes_in(fetched) / 1e6, "MB"),
            row(NAME, "on the disk", _bytes_in(clone / ".nox") / 1e6, "MB"),
            row(NAME, "installation", seconds, "s of the processor"),
        ]


def _bytes_in(folder: Path) -> int:
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in paths)


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    run_benchmark(__doc__, measure)
