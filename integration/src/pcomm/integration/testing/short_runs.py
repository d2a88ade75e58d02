"""A few training steps on whatever ranks there are, and what they leave."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pcomm.core import connect
from pcomm.core.checkpoint import ShardView
from pcomm.integration import recipes
from pcomm.integration.config import Config, ParallelConfig
from pcomm.integration.config_file import apply_overrides
from pcomm.integration.config_rules import validate
from pcomm.integration.data.batches import TrainBatches
from pcomm.integration.data.preparation import open_prepared, prepare
from pcomm.integration.parallelize import build_model, open_run_groups
from pcomm.integration.train.run import Outcome, run_training
from pcomm.integration.train.trainer import Trainer

__all__ = [
    "UNEVEN_SIZES",
    "Steps",
    "open_trainer",
    "prepare_words",
    "run_words",
    "tiny_config",
    "train_steps",
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


@dataclasses.dataclass(frozen=True)
class Steps:
    """What some steps leave on this rank.

    Args:
        rows: Loss and gradient norm of each step, which do not depend on the clock.
        views: This rank's part of every tensor that a checkpoint would hold, by name.
    """

    rows: list[list[float]]
    views: dict[str, ShardView]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The whole tensors, on one process."""
        return {name: view.tensor for name, view in self.views.items()}


def tiny_config(
    parallel: ParallelConfig | None = None,
    *,
    model: Mapping[str, Any] | None = None,
    **train: Any,
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


def write_words(folder: Path, *, documents: int = 60) -> str:
    """Write documents that repeat few words into `folder`; returns the glob of them. Local."""
    folder.mkdir(exist_ok=True)
    for number in range(documents):
        words = [f"word{(number * 7 + n * n) % 31}" for n in range(5 + number)]
        (folder / f"{number}.txt").write_text(" ".join(words))
    return f"{folder}/*.txt"


def prepare_words(folder: Path, *, documents: int = 60) -> Path:
    """`folder` with tokens of documents that repeat few words; their text is in `text`. Local."""
    glob = write_words(folder / "text", documents=documents)
    prepare(dataclasses.replace(recipes.tiny().data, path=(glob,)), folder)
    return folder


def run_words(
    text: Path | str, run_dir: Path, *overrides: str, must_restart: bool = False
) -> Outcome:
    """A whole run of the recipe `tiny` on the files `text`, without its progress lines.

    Collective over all ranks, of whatever world there is.

    Args:
        text: A file or glob, such as that of `write_words`.
        run_dir: Folder of the run.
        overrides: `section.key=value`, as `--set` takes them.
        must_restart: True to begin anew.
    """
    config = apply_overrides(recipes.tiny(), [f"data.path=['{text}']", *overrides])
    return run_training(config, run_dir, must_restart=must_restart, stream=io.StringIO())


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
            batches = TrainBatches(
                open_prepared(run_dir).train,
                seed=resolved.train.seed,
                sequence_length=resolved.train.sequence_length,
                global_batch_tokens=resolved.train.global_batch_tokens,
                micro_batch_tokens=resolved.train.micro_batch_tokens,
            )
            model = build_model(resolved, groups, world.device, dtype=dtype)
            yield Trainer(model, groups, resolved, batches)


def train_steps(config: Config, run_dir: Path, dtype: torch.dtype, steps: int) -> Steps:
    """What the first steps leave; see `open_trainer`. Collective over all ranks."""
    with open_trainer(config, run_dir, dtype) as trainer:
        rows = [trainer.step(index).row for index in range(steps)]
        views = {name: view.clone() for name, view in trainer.shard_views().items()}
    return Steps([[row["loss"], row["grad_norm"]] for row in rows], views)


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
