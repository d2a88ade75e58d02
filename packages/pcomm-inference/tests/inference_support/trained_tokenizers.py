"""Tokenizers of three kinds behind the protocol, trained on the text that a test gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

__all__ = ["Tokens", "byte_fallback", "byte_level", "unigram"]


class Tokens:
    """The protocol around a tokenizer of the library; it counts the tokens that it decodes."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, eos_ids: Sequence[int] = (1,)) -> None:
        self.tokenizer, self.eos_ids, self.decoded = tokenizer, eos_ids, 0

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def to_json(self) -> str:
        return self.tokenizer.to_str()


def byte_level(corpus: Sequence[str], size: int = 420) -> Tokens:
    """Bytes and merges, as GPT-2, Llama 3 and Qwen have them; merges may end within characters.

    The first id is a mark, the second one an end.
    """
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(made, trainers.BpeTrainer, corpus, size, initial_alphabet=alphabet)


def unigram(corpus: Sequence[str], size: int = 200) -> Tokens:
    """SentencePiece's kind: a mark stands for each space, that of the first word is dropped."""
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    letters = ["▁", *sorted(set("".join(corpus)) | set("\n<|>�"))]
    settings = {"unk_token": "<|pad|>", "initial_alphabet": letters}
    return _trained(made, trainers.UnigramTrainer, corpus, size, **settings)


def _trained(made: Any, kind: Any, corpus: Sequence[str], size: int, **settings: Any) -> Tokens:
    special = ["<|pad|>", "<|end|>"]
    trainer = kind(vocab_size=size, special_tokens=special, show_progress=False, **settings)
    made.train_from_iterator([*corpus] * 3, trainer)
    return Tokens(made)


def byte_fallback() -> Tokens:
    """Llama 2's kind: characters that are no token are tokens of bytes."""
    words = ["<unk>", "<s>", "▁", *"abcdehimnost.,", "▁t", "th", "▁th", "▁the"]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [("▁", "t"), ("t", "h"), ("▁t", "h"), ("▁th", "e")]
    ids = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
    made.add_special_tokens(["<unk>", "<s>"])
    prepend, replace = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([prepend, replace])
    spaces, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    parts = [spaces, decoders.ByteFallback(), decoders.Fuse(), strip]
    made.decoder = decoders.Sequence(parts)
    return Tokens(made)
