"""One training step of the quick-start GPT against the same model in plain PyTorch.

    python integration/benchmarks/training_step.py --csv docs/benchmarks/integration.csv

Both start from the same weights and see the same full rows, one document each, with the same fused
AdamW and clipping. Before anything is timed their losses of three steps must agree. Ours runs
through the Trainer, with everything that a step of `pcomm train` does; one process, one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from _plain_gpt import PlainGPT
from torch.optim import AdamW

from pcomm.core import connect
from pcomm.integration import build_model, open_run_groups, recipes, validate
from pcomm.integration.data.batches import TrainBatches
from pcomm.integration.data.token_cache import TokenCorpus
from pcomm.integration.train.run_state import learning_rate
from pcomm.integration.train.trainer import Trainer

# The runner of benchmarks is in no wheel.
sys.path.append(str(Path(__file__).parents[2] / "packages" / "pcomm-core" / "benchmarks"))

from core_bench.rows import Row
from core_bench.runner import compare, run_benchmark, time_cases

ROUNDS = 15


def random_corpus(vocabulary: int, row_length: int, num_rows: int) -> TokenCorpus:
    """Documents that are longer than all rows that are read, so that every row is one segment."""
    ids = np.random.default_rng(0).integers(0, vocabulary, row_length * num_rows)
    return TokenCorpus(
        tokens=ids.astype(np.uint16),
        offsets=np.array([0, len(ids)]),
        bytes_per_id=np.ones(vocabulary, dtype=np.int32),
        end_id=vocabulary - 1,
    )


def plain_step(
    model: PlainGPT, optimizer: AdamW, batches: TrainBatches, rate: Callable[[int], float]
) -> Callable[[int], float]:
    """A step as one would write it."""
    rows = batches.rows_per_batch

    def step(index: int) -> float:
        batch = batches.batch(index)
        tokens, targets = (
            torch.from_numpy(x).view(rows, -1) for x in (batch.tokens, batch.targets)
        )
        optimizer.zero_grad(set_to_none=True)
        loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(index)
        optimizer.step()
        return loss.item()

    return step


def measure() -> Sequence[Row]:
    """Three steps compared, then both timed in turns."""
    torch.set_num_threads(1)
    with connect() as world:
        config = validate(recipes.quickstart(), 1)
        train = config.train
        corpus = random_corpus(config.data.vocabulary, train.sequence_length, 1 << 14)
        batches = TrainBatches(
            corpus,
            seed=0,
            sequence_length=train.sequence_length,
            global_batch_tokens=train.global_batch_tokens,
        )
        with open_run_groups(config, world) as groups:
            model = build_model(config, groups, world.device)
            trainer = Trainer(model, groups, config, batches)
            plain = PlainGPT(config.model, config.data.vocabulary, train.sequence_length)
            plain.copy_from(model)
            decaying = [parameter for parameter in plain.parameters() if parameter.dim() >= 2]
            others = [parameter for parameter in plain.parameters() if parameter.dim() < 2]
            optimizer = AdamW(
                [
                    {"params": decaying, "weight_decay": train.weight_decay},
                    {"params": others, "weight_decay": 0.0},
                ],
                lr=train.learning_rate,
                betas=train.betas,
                fused=True,
            )
            step = plain_step(plain, optimizer, batches, lambda i: learning_rate(train, i))
            for index in range(3):
                ours, theirs = trainer.step(index).row["loss"], step(index)
                assert abs(ours - theirs) < 1e-4, f"step {index}: losses {ours} and {theirs}"
            found = time_cases(
                {"plain PyTorch": lambda: step(3), "pcomm": lambda: trainer.step(3)},
                rounds=ROUNDS,
                round_s=0.001,
            )
    return compare("training_step", found["pcomm"], found["plain PyTorch"])


if __name__ == "__main__":
    run_benchmark(__doc__, measure)
