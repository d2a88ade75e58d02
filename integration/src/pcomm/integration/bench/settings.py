"""What is measured: parts, models, numbers of streams, lengths. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pcomm.core.command.bench.options import check_counts, check_parts, check_rounds
from pcomm.integration.bench.models_measured import FULL, SMALL, Models

__all__ = ["PARTS", "QUICK", "Settings"]

PARTS = {
    "streams": "tokens/s of 1, 8 and 32 streams beside `generate` and the matrix products alone",
    "tiny": "steps of a tiny Llama beside transformers' forward and `generate`",
    "context": "tokens/s of recurrent models by the length of the context",
    "prefix": "time to the first token of a prompt that is cached for the most part",
    "prompt": "a long prompt beside its matrix products and attention kernels alone",
    "server": "milliseconds that HTTP adds to a streamed token",
}
"""Words by the name of each part."""


@dataclass(frozen=True)
class Settings:
    """A run of the benchmark.

    Args:
        parts: Names of the parts to measure.
        model: Hugging Face directory for the parts `streams` and `prompt`; None for random weights.
        threads: Numbers of threads of torch in the part `streams`; the last one is that of the part
            `prompt` and of the prompts of `context`, and all else has one thread.
        rounds: Number of turns of each case that count.
        models: Models by what they are for.
        dtype: Dtype of the weights of `models.large`; the others are fp32.
        streams: Numbers of texts that are written at once.
        prompt: Tokens of each prompt of `streams`.
        mixed: Tokens of the shortest and of the longest prompt where streams outnumber those of
            transformers.
        most_of_theirs: Most streams of transformers.
        steps: Steps of decoding of a turn.
        contexts: Numbers of tokens in the part `context`, ascending.
        their_chunk: Tokens of these that transformers computes together.
        prefix_prompt: Tokens of the prompts of `prefix`, a multiple of 640: nine tenths of it end a
            chunk of every recurrent layer.
        long_prompt: Tokens of the prompt of `prompt`.
        chunk: Tokens of a step in the part `prompt`.
        server_streams: Streams of `server`.
        server_tokens: Tokens of each of its streams.
    """

    parts: tuple[str, ...] = tuple(PARTS)
    model: Path | None = None
    threads: tuple[int, ...] = (1, 2)
    rounds: int = 7
    models: Models = FULL
    dtype: str = "bfloat16"
    streams: tuple[int, ...] = (1, 8, 32)
    prompt: int = 64
    mixed: tuple[int, int] = (16, 512)
    most_of_theirs: int = 8
    steps: int = 16
    contexts: tuple[int, ...] = (128, 1024, 4096, 16384)
    their_chunk: int = 1024
    prefix_prompt: int = 2560
    long_prompt: int = 6000
    chunk: int = 2048
    server_streams: int = 8
    server_tokens: int = 128

    def __post_init__(self) -> None:
        check_parts("serving", self.parts, PARTS)
        counts = {"--streams": self.streams, "--contexts": self.contexts, "--threads": self.threads}
        check_counts("serving", counts)
        check_rounds("serving", self.rounds, fewest=3, better=7)


QUICK = Settings(
    threads=(1,),
    rounds=3,
    models=SMALL,
    dtype="float32",
    streams=(1, 2, 3),
    prompt=8,
    mixed=(4, 24),
    most_of_theirs=2,
    steps=4,
    contexts=(16, 96),
    their_chunk=64,
    prefix_prompt=640,
    long_prompt=300,
    chunk=128,
    server_streams=2,
    server_tokens=8,
)
"""Models of a few weights and few rounds: for a look at the output, not for figures."""
