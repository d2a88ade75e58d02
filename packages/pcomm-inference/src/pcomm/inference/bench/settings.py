"""What is measured: shapes of models, numbers of streams, lengths of contexts. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from pcomm.core.command.bench.options import check_counts, check_rounds

__all__ = ["SHAPES", "Settings", "Shape"]


@dataclass(frozen=True)
class Shape:
    """Widths of a model of Llama's kind, whose head is its embedding.

    Args:
        name: Name in the rows.
        layers: Number of layers.
        width: Width of the residual stream.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        head_dim: Width of a head.
        mlp_width: Width between the two matrices of the MLP.
        vocabulary: Number of token ids.
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocabulary: int


SHAPES = (
    Shape("tiny", 4, 64, 4, 2, 16, 176, 512),
    Shape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152),
)


@dataclass(frozen=True)
class Settings:
    """A run of the benchmark.

    Args:
        shapes: Models, one after another.
        streams: Numbers of texts that are written at once.
        contexts: Lengths of the context at which one stream is measured, ascending.
        prompt: Tokens of each prompt where streams are measured.
        rows: Numbers of requests of a step whose bookkeeping is measured.
        product_rows: Numbers of tokens whose products are measured with each form of the weights.
        threads: Numbers of threads, one after another.
        rounds: Number of steps of each measurement.
    """

    shapes: tuple[Shape, ...] = SHAPES
    streams: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 512, 2048, 8192)
    prompt: int = 64
    rows: tuple[int, ...] = (1, 8, 64)
    product_rows: tuple[int, ...] = (1, 4, 8, 16, 64, 256)
    threads: tuple[int, ...] = (1, 2)
    rounds: int = 31

    def __post_init__(self) -> None:
        counts = {
            "--streams": self.streams,
            "--contexts": self.contexts,
            "--threads": self.threads,
            "--rows": self.rows,
        }
        check_counts("inference", counts)
        check_rounds("inference", self.rounds, fewest=7, better=31)
