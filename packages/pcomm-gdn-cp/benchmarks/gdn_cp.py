"""`pcomm bench gdn-cp` for `nox -s bench`: beside the rows it also leaves a picture.

python packages/pcomm-gdn-cp/benchmarks/gdn_cp.py --csv docs/benchmarks/gdn_cp.csv
"""

from __future__ import annotations

import sys
from pathlib import Path

from pcomm.core.cli import main


def with_picture(words: list[str]) -> list[str]:
    """The picture lies beside the file of the rows."""
    if "--csv" not in words[:-1]:
        return words
    rows = Path(words[words.index("--csv") + 1])
    return [*words, "--plot", str(rows.parent)]


if __name__ == "__main__":
    sys.exit(main(["bench", "gdn-cp", *with_picture(sys.argv[1:])]))
