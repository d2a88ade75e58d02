"""Runs of `pcomm train` that take a second, for tests of what reads them."""

from __future__ import annotations

from pathlib import Path

from pcomm.integration.testing.short_runs import run_words, write_words

__all__ = ["PATTERNS", "tiny_run"]

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
