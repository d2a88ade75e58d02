"""Write which models fit into resilient runs, on the page about failed GPUs.

    python tools/what_fits.py

A test computes the table again. Nothing is estimated: weights, gradients and the owned state of
rank 0 are those that `pcomm train --dry-run --resilient` counts, without a step.
"""

from __future__ import annotations

from typing import NamedTuple

from pcomm.integration.config.rules import validate_resilient
from pcomm.integration.config.sections import Config
from pcomm.integration.config.toml import apply_overrides
from pcomm.integration.forecast.resilient_step import state_bytes
from repository import ROOT

__all__ = ["MODELS", "PAGE", "RANKS", "SPLITS", "Size", "filled", "row"]

PAGE = ROOT / "docs" / "how-to" / "survive-failed-gpus.md"
_BEGIN, _END = "<!-- what fits -->\n", "<!-- end of what fits -->"

# GB of a GPU, of 10^9 bytes.
_MEMORY = 80.0
RANKS, SPLITS, _COPIES = (8, 16, 64), (4, 8), (2, 1)


class Size(NamedTuple):
    """The shape of a GPT; it has eight heads of keys and values."""

    layers: int
    width: int
    heads: int
    mlp_width: int
    is_tied: bool


MODELS = {
    "0.5B": Size(24, 1024, 16, 4096, is_tied=True),
    "1B": Size(16, 2048, 32, 8192, is_tied=True),
    "3B": Size(28, 3072, 24, 8192, is_tied=True),
    "8B": Size(32, 4096, 32, 14336, is_tied=False),
    "30B": Size(60, 6144, 48, 20480, is_tied=False),
}


def row(name: str, tp: int) -> str:
    """The line of a model at a tensor-parallel degree."""
    cells = [_cell(MODELS[name], tp, 2 * tp, None)]
    for ranks in RANKS:
        # With as many copies as replicas, or more, nothing is saved.
        cells += [
            _cell(MODELS[name], tp, ranks, copies) if copies < ranks // tp else "-"
            for copies in _COPIES
        ]
    return f"| {name} | {tp} | " + " | ".join(cells) + " |"


def _cell(size: Size, tp: int, ranks: int, copies: int | None) -> str:
    """GB of the state of a rank, in brackets where it is more than a GPU has."""
    words = [
        f"model.layers={size.layers}",
        f"model.width={size.width}",
        f"model.heads={size.heads}",
        "model.kv_heads=8",
        f"model.mlp_width={size.mlp_width}",
        f"model.tie_embeddings={str(size.is_tied).lower()}",
        "data.vocabulary=128256",
        f"parallel.tp={tp}",
        "train.sequence_length=4096",
        f"train.global_batch_tokens={4096 * ranks}",
    ]
    if copies is not None:
        words += ["parallel.data='shard'", f"parallel.copies={copies}"]
    config = validate_resilient(apply_overrides(Config(), words), ranks)
    amount = sum(state_bytes(config)) / 1e9
    return f"{amount:.1f}" if amount <= _MEMORY else f"({amount:.0f})"


def filled(page: str, lines: list[str]) -> str:
    """A page with these lines in place of the table's."""
    begin, end = page.index(_BEGIN) + len(_BEGIN), page.index(_END)
    return page[:begin] + "\n" + "\n".join(lines) + "\n\n" + page[end:]


def head() -> list[str]:
    """The first two lines of the table."""
    cells = ["model", "TP", "replicas"]
    cells += [f"{ranks} GPUs, {_counted(n)}" for ranks in RANKS for n in _COPIES]
    return ["| " + " | ".join(cells) + " |", "|---" * len(cells) + "|"]


def _counted(copies: int) -> str:
    return f"{copies} copies" if copies > 1 else "1 copy"


if __name__ == "__main__":
    rows = [row(name, tp) for name in MODELS for tp in SPLITS]
    PAGE.write_text(filled(PAGE.read_text(), [*head(), *rows]))
