"""What docs/gpu-kernels.md and docs/gpu-counts.md predict, beside what a GPU was measured to do.

`first_gpu_hour.py` joins both by the rows of its lines; alone it needs nothing but Python:

    python tools/gpu_predictions.py docs/hardware/NAME.jsonl

A row names its case as the page does, and has a number for each quantity that it measured. Each
prediction has a line: with its ratio, or with the reason why it was not measured.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["MEASURED_BY", "Joined", "Prediction", "join", "predictions", "table"]

DOCS = Path(__file__).resolve().parents[1] / "docs"
# Commands of `first_gpu_hour.py`, by the page whose numbers they measure.
MEASURED_BY = {"gpu-kernels": "kernels", "gpu-counts": "counts"}
OPTIMIZER = "a step of AdamW"

# The quantities in the columns behind the first one; None is derived from others, or is no number.
_SERVING = ("launches", None, "attention launches", "choosing", "waits", "uploads", "GB")
_TRAINING = ("launches forward", "launches backward", "waits", "GB forward", "GB backward")
_OPTIMIZER = ("launches", "waits", "GB")
_KERNEL = {"registers": "registers", "spilled": "spilled", "fit": "fit", "share": "share %"}

_OVER_LINK = "no stage moves bytes between 8 GPUs"
_NO_BYTES = "no stage reads counters of memory, for which it would need Nsight Compute"
# Quantities that no stage measures.
_NEVER = {
    "attention launches": "no stage counts within a layer, and a replayed graph has no layers",
    "peak GB": "no stage trains a model of this shape",
    "GB": _NO_BYTES,
    "GB forward": _NO_BYTES,
    "GB backward": _NO_BYTES,
}


class Prediction(NamedTuple):
    """A number of a page."""

    page: str
    """`gpu-kernels` or `gpu-counts`."""

    device: str
    """The GPU that it is for; empty for any."""

    case: str
    """The kernel, the step or the layer."""

    quantity: str
    predicted: float
    package: str = ""

    @property
    def never(self) -> str:
        """Why no stage measures it; empty where one does."""
        if self.package == "nvls" and self.quantity == "share %":
            return _OVER_LINK
        return _NEVER.get(self.quantity, "")


class Joined(NamedTuple):
    """A prediction, and what was measured of it or why nothing was."""

    prediction: Prediction
    measured: float | None
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured by predicted; None for a number that has no ratio to the other."""
        expected = self.prediction.predicted
        if self.measured is None or (expected == 0 and self.measured != 0):
            return None
        return self.measured / expected if expected else 1.0


# -- what the pages say ------------------------------------------------------------------------


def predictions(docs: Path = DOCS) -> list[Prediction]:
    """Each number that the two pages predict, in their order."""
    kernels, counts = (docs.joinpath(f"{page}.md").read_text() for page in MEASURED_BY)
    return [*_of_kernels(kernels), *_of_counts(counts)]


def _of_kernels(text: str) -> Iterator[Prediction]:
    for heading, head, rows in _tables(text):
        gpu, is_table, _ = heading.partition(", sm_")
        for cells in rows if is_table else ():
            of = dict(zip(head, cells, strict=True))
            name = of["kernel"].strip("`")
            for column, quantity in _KERNEL.items():
                number = _number(of[column])
                yield Prediction("gpu-kernels", gpu, name, quantity, number, of["package"])


def _of_counts(text: str) -> Iterator[Prediction]:
    kinds: dict[str, Sequence[str | None]] = {"Serving": _SERVING, "Training": _TRAINING}
    for heading, head, rows in _tables(text):
        if heading == "Memory of a rank in training":
            for cells in rows:
                peak = _number(cells[head.index("peak")])
                case = f"{cells[0]}, blocks {cells[1]}"
                yield Prediction("gpu-counts", "", case, "peak GB", peak)
        for cells in rows if heading in kinds else ():
            for quantity, cell in zip(kinds[heading], cells[1:], strict=False):
                if quantity:
                    yield Prediction("gpu-counts", "", cells[0], quantity, _number(cell))
    update = re.search(r"AdamW .* is (\d+) launches, (\d+) waits and\s([\d.]+) GB", text)
    if update:
        for quantity, cell in zip(_OPTIMIZER, update.groups(), strict=True):
            yield Prediction("gpu-counts", "", OPTIMIZER, quantity, _number(cell))


def _tables(text: str) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Each table of a page: the heading above, its head, and its rows."""
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading = section.partition("\n")[0]
        for found in re.findall(r"(?:^\|.*\|\n?)+", section, re.MULTILINE):
            head, _, *rows = (line.strip("| \n").split(" | ") for line in found.splitlines())
            yield heading, head, rows


def _number(cell: str) -> float:
    """The first number of a cell: of `3, registers`, of `15 %`, of `1,024`."""
    found = re.match(r"[\d,]*\d(?:\.\d+)?", cell)
    if found is None:
        raise ValueError(f"{cell!r} begins with no number")
    return float(found[0].replace(",", ""))


# -- beside what was measured ------------------------------------------------------------------


def join(
    predicted: Iterable[Prediction], lines: Iterable[Mapping[str, Any]], stages: Mapping[str, int]
) -> list[Joined]:
    """Each prediction with its number or its reason.

    Args:
        predicted: Predictions.
        lines: Lines of `first_gpu_hour.py`; of a command the last one counts.
        stages: Numbers of the stages by the names of their commands.
    """
    newest = {line["name"]: line for line in lines}
    return [_joined(one, newest, stages) for one in predicted]


def _joined(
    one: Prediction, newest: Mapping[str, Mapping[str, Any]], stages: Mapping[str, int]
) -> Joined:
    if one.never:
        return Joined(one, None, one.never)
    name = MEASURED_BY[one.page]
    command = f"`{name}` of stage {stages[name]}"
    line = newest.get(name)
    if line is None:
        return Joined(one, None, f"{command} was not asked for")
    rows = [row for row in line.get("rows", ()) if row.get("gpu", "") == one.device]
    of_case = [row for row in rows if row.get("case") == one.case]
    values = [row[one.quantity] for row in of_case if row.get(one.quantity) is not None]
    if values:
        return Joined(one, float(values[-1]))
    errors = [row["error"] for row in of_case if "error" in row]
    if errors:
        return Joined(one, None, f"{command}: {errors[-1]}")
    if line["status"] != "ok":
        return Joined(one, None, f"{command}: {line['status']}")
    if not rows and one.device:
        return Joined(one, None, f"{command} ran on no {one.device}")
    return Joined(one, None, f"{command} told nothing of it")


def table(found: Sequence[Joined], device: str) -> str:
    """The text of the report: a line for each that was measured, then those that were not.

    Of a case, all predictions that were not measured for one reason are in one line, each with its
    number.

    Args:
        found: Predictions with their measurements, from `join`.
        device: Name of the GPU that was measured; empty for none.
    """
    measured = [one for one in found if one.measured is not None]
    text = f"# Predictions beside measurements\n\nOn {device or 'no GPU'}: {len(measured)} of "
    text += f"{len(found)} predictions were measured.\n"
    if measured:
        text += "\n| what | predicted | measured | ratio |\n|---|---|---|---|\n"
    for one in measured:
        case, what = _case(one.prediction), one.prediction.quantity
        ratio = "-" if one.ratio is None else f"{one.ratio:.2f}"
        text += f"| {case}, {what} | {one.prediction.predicted:g} | {one.measured:g} | {ratio} |\n"
    groups: dict[tuple[str, str], list[str]] = {}
    for one in found:
        if one.measured is None:
            told = f"{one.prediction.quantity} {one.prediction.predicted:g}"
            groups.setdefault((_case(one.prediction), one.reason), []).append(told)
    if groups:
        text += "\n## Not measured\n\n"
    for (case, reason), numbers in groups.items():
        text += f"- {case}: {', '.join(numbers)}: {reason}\n"
    return text


def summary(found: Sequence[Joined], most: int = 6) -> list[str]:
    """How many were measured, and those that are farthest from what was predicted."""
    measured = [one for one in found if one.measured is not None]
    far = [one for one in measured if one.ratio is None or not 0.9 <= one.ratio <= 1.1]
    far.sort(key=lambda one: _distance(one.ratio), reverse=True)
    text = [f"  {len(measured)} of {len(found)} were measured, {len(far)} are 10 % or more away"]
    for one in far[:most]:
        case, expected = _case(one.prediction), one.prediction.predicted
        text.append(f"    {case}, {one.prediction.quantity}: {one.measured:g}, not {expected:g}")
    return text


def _distance(ratio: float | None) -> float:
    return max(ratio, 1 / ratio) if ratio else float("inf")


def _case(one: Prediction) -> str:
    return f"{one.device}, {one.case}" if one.device else one.case


def report(lines: Path, stages: Mapping[str, int]) -> tuple[str, list[str]]:
    """The table and its summary, from a file of lines."""
    told = list(map(json.loads, lines.read_text().splitlines()))
    names = [row["names"] for line in told for row in line.get("rows", ()) if row.get("names")]
    found = join(predictions(), told, stages)
    return table(found, names[-1][0] if names else ""), summary(found)


if __name__ == "__main__":
    from first_gpu_hour import STAGE_OF

    print(report(Path(sys.argv[1]), STAGE_OF)[0], end="")
