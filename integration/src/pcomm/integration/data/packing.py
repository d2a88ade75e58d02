"""Rows of packed documents: what a model reads in one forward pass, and what it must predict.

Every token but a document's first is predicted exactly once, and only from its own document:
attention and positions start anew at each segment, and nothing predicts across a document's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pcomm.core.errors import ConfigError
from pcomm.integration.data.token_cache import TokenCorpus

__all__ = ["IGNORE", "PADDING", "Batch", "Segment", "pack", "padded"]

IGNORE = -100
"""The target of a token that predicts nothing; torch's cross-entropy leaves it out by default."""

PADDING = -1
"""The `start` of a segment that only fills a row."""


class Segment(NamedTuple):
    """A part of one document within one row."""

    start: int
    """First token, counted in the corpus; or `PADDING`."""

    length: int
    """How many tokens, at least 1."""

    ends_document: bool
    """Whether its last token is the document's last, which predicts nothing."""


@dataclass(frozen=True)
class Batch:
    """The tokens that one rank computes at once. T tokens in S segments."""

    tokens: NDArray[np.int64]
    """`[T]`, inputs."""

    targets: NDArray[np.int64]
    """`[T]`, the next token of the same document, or `IGNORE`."""

    cu_seqlens: tuple[int, ...]
    """`S + 1` boundaries: segment s is `cu_seqlens[s]:cu_seqlens[s + 1]`; from 0 to T."""

    num_bytes: int
    """Bytes of text that the targets stand for; a document's end counts as a target of 0 bytes."""


def pack(corpus: TokenCorpus, segments: Sequence[Segment]) -> Batch:
    """The batch that consists of `segments`, one after the other.

    Raises:
        ConfigError: A token is none of the vocabulary: its file has been damaged.
    """
    cu_seqlens = [0]
    for segment in segments:
        cu_seqlens.append(cu_seqlens[-1] + segment.length)
    tokens = np.full(cu_seqlens[-1], corpus.end_id, dtype=np.int64)
    targets = np.full(cu_seqlens[-1], IGNORE, dtype=np.int64)
    for segment, begin, end in zip(segments, cu_seqlens, cu_seqlens[1:], strict=False):
        if segment.start == PADDING:
            continue
        stop = segment.start + segment.length
        tokens[begin:end] = corpus.tokens[segment.start : stop]
        # A document that goes on in the next row gives this row its last target as well.
        known = segment.length - 1 if segment.ends_document else segment.length
        targets[begin : begin + known] = corpus.tokens[segment.start + 1 : stop + 1][:known]
    num_ids = len(corpus.bytes_per_id)
    if (largest := max(tokens.max(initial=0), targets.max(initial=0))) >= num_ids:
        raise ConfigError(
            "tokens of the run",
            found=f"the id {largest}, and a vocabulary of {num_ids}",
            why="The file of the tokens has changed since it was written.",
            fix="Start the run again: its first rank compares the files with their checksums.",
        )
    predicted = targets[targets != IGNORE]
    return Batch(
        tokens=tokens,
        targets=targets,
        cu_seqlens=tuple(cu_seqlens),
        num_bytes=int(corpus.bytes_per_id[predicted].sum(dtype=np.int64)),
    )


def padded(batch: Batch, multiple: int) -> Batch:
    """`batch` with a document of ignored targets behind it, so that `multiple` divides its tokens.

    Args:
        batch: Tokens of any number.
        multiple: Number of ranks that have to hold as many tokens each.

    Returns:
        `batch` itself where nothing is missing.
    """
    missing = -len(batch.tokens) % multiple
    if not missing:
        return batch
    # Any id will do: the document is read by no other, and nothing is learnt from it.
    return Batch(
        tokens=np.concatenate([batch.tokens, np.zeros(missing, np.int64)]),
        targets=np.concatenate([batch.targets, np.full(missing, IGNORE, np.int64)]),
        cu_seqlens=(*batch.cu_seqlens, batch.cu_seqlens[-1] + missing),
        num_bytes=batch.num_bytes,
    )
