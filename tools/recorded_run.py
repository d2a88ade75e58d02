"""A recording of a run whose ranks died: its lines, its file, and what a page says of it.

A recording has two runs of the same seed: `killed`, whose ranks were killed, and `undisturbed`.
Nothing here starts a process or reads a clock; `record_resilient_run.py` does.
"""

import csv
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

KILLED, UNDISTURBED = "killed", "undisturbed"

Metrics = Sequence[Mapping[str, float | None]]
"""Rows of a `metrics.jsonl`."""


@dataclass(frozen=True)
class Event:
    """Something that was done to a run.

    Args:
        wall_s: Time of it, in seconds since 1970.
        text: Description of it, such as `rank 1 killed`.
    """

    wall_s: float
    text: str


@dataclass(frozen=True)
class Line:
    """One line of a recording: a step, or an event between steps.

    Args:
        run: `killed` or `undisturbed`.
        seconds: Seconds from the beginning of the first step to the end of this step, or to the
            event.
        step: Number of the step; of an event, the newest step that was finished.
        loss: Loss of the step, in nats per token; None of an event.
        tokens_per_s: Tokens of the step, divided by the seconds since the end of the step before,
            so that recoveries count; None of an event.
        ranks: Number of ranks that trained the step; None of an event.
        degrees: Tensor-parallel degree of each replica, such as `3/4`; empty of an event.
        event: Description of the event; empty of a step.
    """

    run: str
    seconds: float
    step: int
    loss: float | None = None
    tokens_per_s: float | None = None
    ranks: int | None = None
    degrees: str = ""
    event: str = ""


def lines_of(run: str, metrics: Metrics, events: Iterable[Event] = ()) -> list[Line]:
    """Steps and events of one run, in the order of time.

    Args:
        run: `killed` or `undisturbed`.
        metrics: Rows of a resilient run; rows without a loss are left out.
        events: Events of the run.
    """
    steps = [
        {key: value for key, value in row.items() if value is not None}
        for row in metrics
        if row.get("loss") is not None
    ]
    begin = steps[0]["wall_s"] - steps[0]["step_ms"] / 1e3
    ends = [begin, *(row["wall_s"] for row in steps)]
    found = [_step(run, row, begin, before) for row, before in zip(steps, ends, strict=False)]
    for event in events:
        seconds = round(event.wall_s - begin, 3)
        done = [line.step for line in found if not line.event and line.seconds <= seconds]
        found.append(Line(run, seconds, max(done, default=0), event=event.text))
    return sorted(found, key=lambda line: line.seconds)


def _step(run: str, row: Mapping[str, float], begin: float, before: float) -> Line:
    tokens = row["tokens_per_s"] * row["step_ms"] / 1e3
    replicas = itertools.takewhile(lambda key: key in row, (f"tp.{n}" for n in itertools.count()))
    return Line(
        run,
        round(row["wall_s"] - begin, 3),
        int(row["step"]),
        # Losses are compared: all digits stay.
        row["loss"],
        round(tokens / (row["wall_s"] - before), 1),
        int(row["ranks"]),
        "/".join(str(int(row[key])) for key in replicas),
    )


def steps_of(lines: Iterable[Line], run: str) -> list[Line]:
    """The steps of a run, without its events."""
    return [line for line in lines if line.run == run and not line.event]


def events_of(lines: Iterable[Line]) -> list[Line]:
    """The events of the killed run."""
    return [line for line in lines if line.event]


def shapes(lines: Iterable[Line]) -> list[Line]:
    """The first step of the killed run in each of its shapes: after every change of degrees."""
    steps = steps_of(lines, KILLED)
    groups = itertools.groupby(steps, key=lambda line: (line.ranks, line.degrees))
    return [next(group) for _, group in groups]


def furthest_apart(lines: Sequence[Line]) -> tuple[float, int]:
    """The largest difference of both runs' losses at one step, in nats, and the step.

    Raises:
        ValueError: The runs have not the same steps, each of them once.
    """
    mine, theirs = steps_of(lines, KILLED), steps_of(lines, UNDISTURBED)
    if [line.step for line in mine] != [line.step for line in theirs]:
        raise ValueError(f"{len(mine)} and {len(theirs)} steps, which are not the same")
    apart = [
        (abs((one.loss or 0.0) - (two.loss or 0.0)), one.step)
        for one, two in zip(mine, theirs, strict=True)
    ]
    return max(apart, key=lambda pair: pair[0])


def save(path: Path, lines: Iterable[Line], origin: Mapping[str, object]) -> None:
    """Write a recording as CSV; every line also has `origin`, such as its hardware."""
    names = [*(column.name for column in fields(Line)), *origin]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows({**asdict(line), **origin} for line in lines)


def load(path: Path) -> tuple[list[Line], dict[str, str]]:
    """The lines of a recording, and the origin that all of them have."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = {column.name for column in fields(Line)}
    origin = {name: text for name, text in rows[0].items() if name not in names}
    return [_line(row) for row in rows], origin


def _line(row: Mapping[str, str]) -> Line:
    return Line(
        row["run"],
        float(row["seconds"]),
        int(row["step"]),
        float(row["loss"]) if row["loss"] else None,
        float(row["tokens_per_s"]) if row["tokens_per_s"] else None,
        int(row["ranks"]) if row["ranks"] else None,
        row["degrees"],
        row["event"],
    )


def summary(lines: Sequence[Line], origin: Mapping[str, str]) -> str:
    """What the page says of a recording: its course as a table, and where it was made."""
    apart, step = furthest_apart(lines)
    last = steps_of(lines, UNDISTURBED)[-1]
    course = [*events_of(lines), *shapes(lines)]
    table = [
        "| second | step | event | tokens/s until the next change |",
        "|---|---|---|---|",
        *(_course(line, lines) for line in sorted(course, key=lambda line: line.seconds)),
    ]
    where = [f"{name} {text}" for name, text in origin.items() if name not in ("command", "date")]
    return "\n".join(
        [
            *table,
            "",
            f"The losses of the two runs are at most {apart:.1e} nats apart, at step {step}; the "
            f"last one is {last.loss:.4f}.",
            "",
            f"Recorded on {origin['date']}: {', '.join(where)}.",
            "",
        ]
    )


def _course(line: Line, lines: Sequence[Line]) -> str:
    if line.event:
        return f"| {line.seconds:.1f} | after {line.step} | {line.event} | |"
    following = [one.step for one in shapes(lines) if one.step > line.step]
    until = min(following, default=math.inf)
    # The first step of a shape has the recovery in it.
    rates = [
        one.tokens_per_s or 0.0 for one in steps_of(lines, KILLED) if line.step < one.step < until
    ]
    rate = f"{statistics.median(rates):,.0f}" if rates else "-"
    what = f"{line.ranks} ranks train, degrees {line.degrees}"
    return f"| {line.seconds:.1f} | {line.step} | {what} | {rate} |"
