"""A few training steps on whatever ranks there are, and what they leave."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from pcomm.core import connect
from pcomm.core.checkpoint import ShardView
from pcomm.integration import recipes
from pcomm.integration.config import Config
from pcomm.integration.config_rules import validate
from pcomm.integration.data.batches import TrainBatches
from pcomm.integration.data.preparation import open_prepared, prepare
from pcomm.integration.parallelize import build_model, open_run_groups
from pcomm.integration.train.trainer import Trainer

__all__ = ["Steps", "open_trainer", "prepare_words", "train_steps", "worst_difference"]


@dataclasses.dataclass(frozen=True)
class Steps:
    """What some steps leave on this rank.

    Args:
        rows: Of each step, the numbers that do not depend on the clock: loss and gradient norm.
        regions: This rank's parts of everything that a checkpoint would hold, by name.
    """

    rows: list[list[float]]
    regions: dict[str, ShardView]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The whole tensors, on one process."""
        return {name: region.tensor for name, region in self.regions.items()}


def prepare_words(folder: Path, *, documents: int = 60) -> Path:
    """`folder` with tokens of documents that repeat few words. Local."""
    text = folder / "text"
    text.mkdir()
    for number in range(documents):
        words = [f"word{(number * 7 + n * n) % 31}" for n in range(5 + number)]
        (text / f"{number}.txt").write_text(" ".join(words))
    prepare(dataclasses.replace(recipes.tiny().data, path=(str(text / "*.txt"),)), folder)
    return folder


@contextmanager
def open_trainer(config: Config, run_dir: Path, dtype: torch.dtype) -> Iterator[Trainer]:
    """A trainer of `config` on the tokens in `run_dir`, while the context is open.

    Collective over all ranks, of whatever world there is.

    Args:
        config: Fits the number of ranks.
        run_dir: From `prepare_words`.
        dtype: Of the parameters.
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
            built = build_model(resolved, groups, world.device, dtype=dtype)
            yield Trainer(built, resolved, batches)


def train_steps(config: Config, run_dir: Path, dtype: torch.dtype, steps: int) -> Steps:
    """What the first steps leave; see `open_trainer`. Collective over all ranks."""
    with open_trainer(config, run_dir, dtype) as trainer:
        rows = [trainer.step(index).row for index in range(steps)]
        regions = {name: region.clone() for name, region in trainer.regions().items()}
    return Steps([[row["loss"], row["grad_norm"]] for row in rows], regions)


def worst_difference(regions: dict[str, ShardView], whole: dict[str, Tensor]) -> tuple[float, str]:
    """How far this rank's parts are from those of the whole tensors, and where. Local."""
    assert regions.keys() == whole.keys()
    found = []
    for name, region in regions.items():
        for chunk, piece in region.chunks():
            expected = whole[name]
            for dim, place in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                expected = expected.narrow(dim, *place)
            if piece.numel():
                found.append((float((piece - expected).abs().max()), name))
    return max(found)
