"""A tokenizer for random weights, in which every token id is a few letters."""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path

__all__ = ["write_plain_tokenizer"]

_LETTERS = string.ascii_letters + string.digits


def write_plain_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write `tokenizer.json`, byte-level pairs of one, two and three letters. Local.

    A tokenizer that knows fewer ids than the model would make text cheaper than it is.

    Args:
        folder: An existing folder.
        vocabulary: Number of token ids.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = list(itertools.islice(_words(), vocabulary))
    merges = [(word[:-1], word[-1]) for word in words if len(word) > 1]
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )


def _words() -> Iterator[str]:
    for length in (1, 2, 3):
        yield from map("".join, itertools.product(_LETTERS, repeat=length))
