"""A byte-level BPE tokenizer, trained once, and a wait for threads that Ctrl-C ends."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from pcomm.core.errors import ConfigError
from pcomm.integration.files import atomic_write
from pcomm.integration.huggingface.model_from import end_ids_of_run

__all__ = ["END", "Beside", "BytePairTokenizer", "every", "load_tokenizer", "train_tokenizer"]

_log = logging.getLogger("pcomm.train")

END = "<|end|>"
"""The special token that ends every document."""

_SAY_S = 5.0

# Merges are found within words, and the time for a word grows with the square of its length. What
# is longer than this many letters, digits, signs or blanks in a row is cut, which words are not.
_LONGEST_WORD = 256

_BLANK, _BYTE = "\u2581", re.compile("<0x[0-9A-F]{2}>")


class BytePairTokenizer:
    """Text to token ids and back.

    Args:
        tokenizer: A tokenizer that `tokenizers` trained or read.
        end_id: Id of the token that ends a document; None for that of `END`, which the tokenizer
            then has.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, end_id: int | None = None) -> None:
        # Otherwise a text that contains the letters `<|end|>` would end its document.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        end_id = tokenizer.token_to_id(END) if end_id is None else end_id
        assert end_id is not None, "trained with END, or checked by load_tokenizer"
        self.end_id = end_id
        """Id of the token that ends every document."""

    @property
    def num_ids(self) -> int:
        """How many ids are in use: at most the vocabulary asked for, less for a small corpus."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids by which a model ends a text: that of the end of a document."""
        return (self.end_id,)

    def to_json(self) -> str:
        """The tokenizer as the library `tokenizers` writes and reads it."""
        return str(self._tokenizer.to_str(pretty=True))

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without an end."""
        return list(self._tokenizer.encode(text).ids)

    def encode_all(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """The token ids of each text; several texts at once are encoded on all cores.

        Can be interrupted, and says every few seconds how long it has taken.
        """
        batch = list(texts)
        encodings = Beside[list[tokenizers.Encoding]]().run(
            lambda: self._tokenizer.encode_batch_fast(batch),
            every(_SAY_S, time.monotonic, lambda s: _log.info("encoding a text for %.0f s", s)),
        )
        for encoding in encodings:
            yield encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; ends, and ids that stand for nothing, give no text.

        Bytes that are no UTF-8, as at a cut within a character, become the replacement character.
        """
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def bytes_per_id(self, vocabulary: int) -> NDArray[np.int32]:
        """`[vocabulary]`, the bytes of text that each id stands for; 0 for special tokens."""
        lengths = np.zeros(vocabulary, dtype=np.int32)
        # The byte-level alphabet writes each byte as one character; others write text, with a sign
        # for a blank and `<0x0A>` for a byte that is part of no token.
        has_alphabet = '"ByteLevel"' in self._tokenizer.to_str()
        for token, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items():
            is_byte = not has_alphabet and _BYTE.fullmatch(token) is not None
            text = token if has_alphabet else token.replace(_BLANK, " ")
            lengths[token_id] = 1 if is_byte else len(text if has_alphabet else text.encode())
        for token_id, added in self._tokenizer.get_added_tokens_decoder().items():
            lengths[token_id] = 0 if added.special else len(added.content.encode())
        lengths[self.end_id] = 0
        return lengths

    def save(self, path: Path) -> None:
        """Write the tokenizer, whole or not at all, as JSON that `tokenizers` reads."""
        with atomic_write(path) as file:
            file.write(self.to_json().encode())


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> BytePairTokenizer:
    """A tokenizer with at most `vocabulary` ids; the same texts give the same tokenizer.

    Can be interrupted, and says every few seconds how long it has taken.
    """
    beside = Beside[tokenizers.Tokenizer]()
    tokenizer = beside.run(
        lambda: _trained(beside.fed(texts), vocabulary),
        every(
            _SAY_S, time.monotonic, lambda s: _log.info("training the tokenizer: %.0f s so far", s)
        ),
    )
    return BytePairTokenizer(tokenizer)


def _trained(texts: Iterator[str], vocabulary: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    kinds = (r"\p{L}", r"\p{N}", r"[^\s\p{L}\p{N}]", r"\s")
    longest = "|".join(f"{kind}{{{_LONGEST_WORD}}}" for kind in kinds)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(longest), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> BytePairTokenizer:
    """The tokenizer that a run was trained with.

    It has the token `END`, or the run started from a directory, which names the end of a text.

    Raises:
        ConfigError: The file is missing, unreadable, or no tokenizer of this kind.
    """
    try:
        tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises bare Exception for a text that it cannot parse
        found = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise _unusable(path, found) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.token_to_id(END) is not None:
        return BytePairTokenizer(tokenizer)
    ends = end_ids_of_run(path.parent, tokenizer)
    if not ends:
        raise _unusable(path, f"a tokenizer without the token {END}")
    return BytePairTokenizer(tokenizer, ends[0])


def _unusable(path: Path, found: str) -> ConfigError:
    return ConfigError(
        f"tokenizer {path}",
        found=found,
        why="Token ids mean nothing without the tokenizer that the model was trained with.",
        fix="Give the folder of a run that `pcomm train` wrote, or train anew in an empty folder.",
    )


T = TypeVar("T")
Item = TypeVar("Item")

# How long a signal may stay unheard.
_LOOK_S = 0.1


class Beside(Generic[T]):
    """A call that a thread makes, while this one waits for it and hears signals.

    Python delivers signals between two steps of its own, in the main thread alone, and a library
    that computes for minutes takes no such step.
    """

    def __init__(self) -> None:
        self._is_abandoned = threading.Event()

    def run(self, call: Callable[[], T], tick: Callable[[], None]) -> T:
        """What `call` returns, or the exception that it raises. Local.

        An exception here, such as KeyboardInterrupt, leaves the thread behind: it ends with the
        process, or as soon as it comes to `fed`.

        Args:
            call: Function that runs in a thread of its own.
            tick: Function that is called about ten times a second meanwhile.
        """
        results: list[T] = []
        errors: list[BaseException] = []
        is_done = threading.Event()

        def work() -> None:
            try:
                results.append(call())
            except BaseException as error:
                errors.append(error)
            finally:
                is_done.set()

        # The interpreter does not wait for it at its end.
        thread = threading.Thread(target=work, name="pcomm beside", daemon=True)
        thread.start()
        try:
            while not is_done.wait(_LOOK_S):
                tick()
        except BaseException:
            self._is_abandoned.set()
            raise
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    def fed(self, items: Iterable[Item]) -> Iterator[Item]:
        """`items`, until nothing waits for the call any more; then an error ends it."""
        for item in items:
            if self._is_abandoned.is_set():
                raise InterruptedError("nothing waits for this call any more")
            yield item


def every(
    seconds: float, clock: Callable[[], float], say: Callable[[float], None]
) -> Callable[[], None]:
    """A `tick` that calls `say` with the seconds since now, each time `seconds` have passed."""
    start = last = clock()

    def tick() -> None:
        nonlocal last
        now = clock()
        if now - last >= seconds:
            last = now
            say(now - start)

    return tick
