"""A few training steps on whatever ranks there are, what they leave, and numbers to compare."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pcomm.core import connect
from pcomm.core.checkpoint import ShardView
from pcomm.integration import recipes
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, ParallelConfig
from pcomm.integration.config.toml import apply_overrides
from pcomm.integration.data.preparation import open_prepared, prepare
from pcomm.integration.metrics import sinks
from pcomm.integration.parallelize import build_model, open_run_groups
from pcomm.integration.train import run as run_module
from pcomm.integration.train import speed
from pcomm.integration.train.loop import batches_of
from pcomm.integration.train.run import Outcome, run_training
from pcomm.integration.train.trainer import Trainer

__all__ = [
    "NUMBERS",
    "PATTERNS",
    "UNEVEN_SIZES",
    "Steps",
    "allowed_by_rounding",
    "assert_same_numbers",
    "numbers",
    "open_trainer",
    "prepare_words",
    "run_words",
    "settings",
    "tiny_config",
    "tiny_run",
    "train_quietly",
    "train_steps",
    "whole_rows",
    "without_pictures",
    "worst_difference",
    "write_words",
]


UNEVEN_SIZES: Mapping[str, int] = {
    "layers": 2,
    "width": 16,
    "heads": 10,
    "kv_heads": 5,
    "head_dim": 4,
    "mlp_width": 13,
    "gdn_value_heads": 10,
    "mamba_heads": 10,
    "mamba_groups": 5,
    "mamba_state_dim": 4,
}
"""Keys of `[model]` with five units in each mixer, which 2, 3 and 4 ranks share unevenly."""


NUMBERS = ("loss", "grad_norm", "train_bits_per_byte")
"""What tests compare of the row of a step."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """What some steps leave on this rank.

    Args:
        rows: `NUMBERS` of each step, which do not depend on the clock.
        views: This rank's part of every tensor that a checkpoint would hold, by name.
    """

    rows: list[list[float]]
    views: dict[str, ShardView]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The whole tensors, on one process."""
        return {name: view.tensor for name, view in self.views.items()}


def tiny_config(
    parallel: ParallelConfig | None = None, *, model: Mapping[str, Any] | None = None, **train: Any
) -> Config:
    """The recipe `tiny` with some of its keys changed. Local.

    Args:
        parallel: Division of the work; None for as many replicas as ranks.
        model: Keys of `[model]` to change.
        train: Keys of `[train]` to change.
    """
    tiny = recipes.tiny()
    return dataclasses.replace(
        tiny,
        parallel=parallel or tiny.parallel,
        model=dataclasses.replace(tiny.model, **(model or {})),
        train=dataclasses.replace(tiny.train, **train),
    )


def write_words(folder: Path, *, documents: int = 60, shortest: int = 5) -> str:
    """Write documents that repeat few words into `folder`; returns the glob of them. Local.

    Each has a word more than the one before it, and the first has `shortest`.
    """
    folder.mkdir(exist_ok=True)
    for number in range(documents):
        words = [f"word{(number * 7 + n * n) % 31}" for n in range(shortest + number)]
        (folder / f"{number}.txt").write_text(" ".join(words))
    return f"{folder}/*.txt"


def prepare_words(folder: Path, *, documents: int = 60, shortest: int = 5) -> Path:
    """`folder` with tokens of what `write_words` writes; their text is in `text`. Local."""
    glob = write_words(folder / "text", documents=documents, shortest=shortest)
    prepare(dataclasses.replace(recipes.tiny().data, path=(glob,)), folder)
    return folder


def run_words(
    text: Path | str, run_dir: Path, *overrides: str, must_restart: bool = False
) -> Outcome:
    """A whole run of the recipe `tiny` on the files `text`; see `train_quietly`.

    Collective over all ranks, of whatever world there is.

    Args:
        text: A file or glob, such as that of `write_words`.
        run_dir: Folder of the run.
        overrides: `section.key=value`, as `--set` takes them.
        must_restart: True to begin anew.
    """
    config = apply_overrides(recipes.tiny(), [f"data.path=['{text}']", *overrides])
    return train_quietly(config, run_dir, must_restart=must_restart)


def train_quietly(config: Config, run_dir: Path, *, must_restart: bool = False) -> Outcome:
    """`run_training` without progress lines, the picture and TensorBoard. Collective.

    It takes this machine for one of 1e12 operations a second, rather than measure it.
    """
    with without_pictures(), patch.object(speed, "measured_flops", lambda *_: 1e12):
        return run_training(config, run_dir, must_restart=must_restart, stream=io.StringIO())


@contextmanager
def without_pictures() -> Iterator[None]:
    """Runs of this process write neither the picture nor for TensorBoard. Local.

    To import what draws, and to draw, takes several times as long as a run of a test.
    """
    with (
        patch.object(run_module, "draw_loss", lambda run_dir: None),
        patch.object(sinks, "open_tensorboard", lambda *_, **__: None),
    ):
        yield


@contextmanager
def open_trainer(config: Config, run_dir: Path, dtype: torch.dtype) -> Iterator[Trainer]:
    """A trainer of `config` on the tokens in `run_dir`, while the context is open.

    Collective over all ranks, of whatever world there is.

    Args:
        config: A configuration that fits the number of ranks.
        run_dir: The folder of `prepare_words`.
        dtype: Dtype of the parameters.
    """
    with connect() as world:
        resolved = validate(config, world.size)
        with open_run_groups(resolved, world) as groups:
            batches = batches_of(resolved, open_prepared(run_dir))
            model = build_model(resolved, groups, world.device, dtype=dtype)
            yield Trainer(model, groups, resolved, batches)


def train_steps(config: Config, run_dir: Path, dtype: torch.dtype, steps: int) -> Steps:
    """What the first steps leave; see `open_trainer`. Collective over all ranks."""
    with open_trainer(config, run_dir, dtype) as trainer:
        rows = [trainer.step(index).row for index in range(steps)]
        views = {name: view.clone() for name, view in trainer.shard_views().items()}
    return Steps([[row[key] for key in NUMBERS] for row in rows], views)


def worst_difference(views: dict[str, ShardView], whole: dict[str, Tensor]) -> tuple[float, str]:
    """How far this rank's parts are from those of the whole tensors, and where. Local."""
    assert views.keys() == whole.keys()
    found = []
    for name, view in views.items():
        for chunk, piece in view.chunks():
            expected = whole[name]
            for dim, place in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                expected = expected.narrow(dim, *place)
            if piece.numel():
                found.append((float((piece - expected).abs().max()), name))
    return max(found)


PATTERNS = {"gpt": "A", "mamba": "M", "hybrid": "GA"}
"""Mixers of the models that tests serve."""

_OVERRIDES = (
    "model.layers=2",
    "model.width=32",
    "model.heads=4",
    "model.mlp_width=64",
    # So large that each token decides those that follow, after two steps, too.
    "model.init_std=0.3",
    "train.steps=2",
    "train.sequence_length=64",
    "train.global_batch_tokens=128",
    "train.eval_every='none'",
    "checkpoint.every='end'",
    "data.vocabulary=320",
    "sample.prompt=''",
)


def tiny_run(folder: Path, pattern: str, *overrides: str) -> Path:
    """A run in `folder` whose model has the mixers `pattern`. Local; takes a second.

    Args:
        folder: Folder of the run and of its text.
        pattern: Key `model.pattern`.
        overrides: More settings, such as `model.kv_heads=2`.
    """
    text = write_words(folder / "text", documents=12)
    run = folder / "run"
    run_words(text, run, f"model.pattern='{pattern}'", *_OVERRIDES, *overrides)
    return run


_KEYS = ("loss", "train_bits_per_byte", "balance_loss", "bits_per_byte")
# A unit in the last place of a loss in fp32, where two orders of a sum agree by chance.
_UNIT = 1e-6


def settings(values: Mapping[str, str], *overrides: str) -> list[str]:
    """Words of the command line: `--set key=value` for each, the overrides last."""
    assigned = [f"{key}={value}" for key, value in values.items()]
    return [word for text in (*assigned, *overrides) for word in ("--set", text)]


def whole_rows(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's folder that are whole, also while it is written. Local."""
    file = run / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def numbers(run: Path) -> list[tuple[str, int, float]]:
    """Losses and bits per byte of a run's folder, as `(which, step, value)` in their order."""
    parsed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(key, row["step"], row[key]) for row in parsed for key in _KEYS if key in row]


def allowed_by_rounding(one: Path, other: Path) -> float:
    """How far losses of fp32 may be apart: 8 times as far as in two runs on one process.

    Args:
        one: Folder of a run.
        other: Folder of the same run, with its sums in another order.
    """
    worst = _worst(one, other)
    assert worst < 1e-4, f"two orders of the same sums are {worst:.1e} apart"
    return 8 * max(worst, _UNIT)


def assert_same_numbers(mine: Path, theirs: Path, allowed: float) -> None:
    """Fail unless two runs have the same rows, and numbers at most `allowed` apart."""
    found, expected = ([row[:2] for row in numbers(run)] for run in (mine, theirs))
    assert found == expected, f"{found} instead of {expected}"
    assert found, f"{mine} has no numbers"
    worst = _worst(mine, theirs)
    assert worst <= allowed, f"off by {worst:.2e}, allowed are {allowed:.2e}"


def _worst(one: Path, other: Path) -> float:
    pairs = zip(numbers(one), numbers(other), strict=True)
    return max(abs(a[2] - b[2]) for a, b in pairs)
