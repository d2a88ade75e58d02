"""What a run measures: settings, models by their shapes, and directories of these.

Needs no torch before a directory is written.
"""

from __future__ import annotations

import itertools
import json
import string
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_bench.runner import check_counts, check_parts, check_rounds, option
from pcomm.core.errors import ConfigError


@dataclass(frozen=True)
class Shape:
    """A model that both transformers and pcomm build.

    Args:
        name: Name in the rows.
        family: `model_type` of its configuration.
        fields: Fields of its configuration.
    """

    name: str
    family: str
    fields: Mapping[str, Any]


def llama(name: str, **sizes: int) -> Shape:
    """A model of Llama's kind, whose head is its embedding; for sizes see `_decoder`."""
    return Shape(name, "llama", _decoder(**sizes))


def gated_delta_net(name: str, *, attention_every: int | None = None, **sizes: int) -> Shape:
    """Blocks of Qwen3-Next with dense MLPs: Gated DeltaNet, and attention in some if asked for.

    Args:
        name: Name in the rows.
        attention_every: Every which layer has attention; None for no layer.
        sizes: Those of `_decoder`.
    """
    layers, heads = sizes["layers"], sizes["heads"]
    kinds = ["linear_attention"] * layers
    if attention_every is not None:
        kinds[attention_every - 1 :: attention_every] = ["full_attention"] * (
            layers // attention_every
        )
    own = {"layer_types": kinds, "mlp_only_layers": list(range(layers))}
    own |= {f"linear_num_{what}_heads": heads for what in ("key", "value")}
    own |= {f"linear_{what}_head_dim": sizes["width"] // heads for what in ("key", "value")}
    return Shape(name, "qwen3_next", _decoder(kv_heads=heads, **sizes) | own)


def mamba2(
    name: str, *, layers: int, width: int, heads: int, state: int, vocabulary: int, chunk: int
) -> Shape:
    """A Mamba-2 model without MLPs.

    Args:
        name: Name in the rows.
        layers: Number of layers.
        width: Width of the residual stream; the inner one is twice that.
        heads: Number of heads.
        state: Width of a state.
        vocabulary: Number of token ids.
        chunk: Tokens that transformers computes together in a prompt. It has no other effect; in
            torch their memory grows with it, so a long prompt needs a small one.
    """
    fields = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_heads": heads,
        "head_dim": 2 * width // heads,
        "expand": 2,
        "n_groups": 1,
        "state_size": state,
        "vocab_size": vocabulary,
        "chunk_size": chunk,
        "tie_word_embeddings": True,
    }
    return Shape(name, "mamba2", fields)


def _decoder(*, width: int, heads: int, **sizes: int) -> dict[str, Any]:
    """Fields of a configuration: width of the residual stream, which the heads share, and others.

    Args:
        width: Width of the residual stream.
        heads: Number of query heads.
        sizes: `layers`, `kv_heads`, `mlp_width`, `vocabulary`, and `longest`, the most tokens.
    """
    return {
        "num_hidden_layers": sizes["layers"],
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": width // heads,
        "intermediate_size": sizes["mlp_width"],
        "vocab_size": sizes["vocabulary"],
        "max_position_embeddings": sizes["longest"],
        "tie_word_embeddings": True,
    }


@dataclass(frozen=True)
class Models:
    """Models by what they are for.

    Args:
        large: A Llama, for the parts `streams` and `prompt`.
        tiny: A Llama of some 200,000 parameters, for `tiny`.
        gpt: A Llama of some 10 million parameters, for `context`, `prefix` and `server`.
        delta: Gated DeltaNet of the same size, for `context`.
        mamba: Mamba-2 of the same size, for `context`.
        hybrid: Gated DeltaNet and attention, for `prefix`.
    """

    large: Shape
    tiny: Shape
    gpt: Shape
    delta: Shape
    mamba: Shape
    hybrid: Shape


def _full() -> Models:
    small = {"width": 256, "heads": 4, "mlp_width": 704, "vocabulary": 4096, "longest": 32768}
    large = {"width": 576, "heads": 9, "mlp_width": 1536, "vocabulary": 49152, "longest": 8192}
    return Models(
        llama("SmolLM2-135M", layers=30, kv_heads=3, **large),
        _tiny(),
        llama("GPT", layers=12, kv_heads=2, **small),
        gated_delta_net("GDN", layers=10, **small),
        mamba2("Mamba-2", layers=21, width=256, heads=8, state=64, vocabulary=4096, chunk=64),
        gated_delta_net("hybrid", layers=12, attention_every=4, **small),
    )


def _small() -> Models:
    sizes = {"width": 32, "heads": 2, "mlp_width": 64, "vocabulary": 300, "longest": 1024}
    return Models(
        llama("small", layers=2, kv_heads=1, **sizes),
        _tiny(),
        llama("GPT", layers=2, kv_heads=1, **sizes),
        gated_delta_net("GDN", layers=2, **sizes),
        mamba2("Mamba-2", layers=2, width=32, heads=4, state=16, vocabulary=300, chunk=16),
        gated_delta_net("hybrid", layers=4, attention_every=4, **sizes),
    )


def _tiny() -> Shape:
    sizes = {"width": 64, "heads": 4, "mlp_width": 176, "vocabulary": 512, "longest": 2048}
    return llama("tiny", layers=4, kv_heads=2, **sizes)


FULL = _full()
"""Models whose figures are worth keeping."""

SMALL = _small()
"""Models for a look at the output."""


PARTS = {
    "streams": "tokens/s of 1, 8 and 32 streams beside `generate` and the matrix products alone",
    "tiny": "steps of a tiny Llama beside transformers' forward and `generate`",
    "context": "tokens/s of recurrent models by the length of the context",
    "prefix": "time to the first token of a prompt that is cached for the most part",
    "prompt": "a long prompt beside its matrix products and attention kernels alone",
    "server": "milliseconds that HTTP adds to a streamed token",
}
"""Words by the name of each part."""


def _directory(text: str) -> Path:
    if not (Path(text) / "config.json").is_file():
        raise ConfigError(
            f"pcomm bench serving --model {text}",
            found="no config.json there",
            why="transformers reads the same model, from a Hugging Face directory.",
            fix="Give such a directory, or leave --model out for random weights.",
        )
    return Path(text)


_PARTS = "what is measured. " + "; ".join(f"{name}: {words}" for name, words in PARTS.items())
_MODEL = f"a Llama for `streams` and `prompt` (random weights of the shape of {FULL.large.name})"
_REPORT = "write goals and what was reached there"


@dataclass(frozen=True)
class Settings:
    parts: tuple[str, ...] = option(tuple(PARTS), _PARTS, metavar="NAME,NAME")
    model: Path | None = option(None, _MODEL, metavar="DIR", parse=_directory)
    streams: tuple[int, ...] = option((1, 8, 32), "texts at once")
    # Ascending.
    contexts: tuple[int, ...] = option((128, 1024, 4096, 16384), "tokens of context", metavar="T,T")
    # Of the part `streams`; the last one is that of the part `prompt` and of the prompts of
    # `context`, and all else has one thread.
    threads: tuple[int, ...] = option((1, 2), "threads of torch")
    rounds: int = option(7, "turns of each case", metavar="R")
    report: Path | None = option(None, _REPORT, metavar="FILE", parse=Path)
    models: Models = FULL
    # Of the weights of `models.large`; the others are fp32.
    dtype: str = "bfloat16"
    # Tokens of each prompt of `streams`.
    prompt: int = 64
    # Tokens of the shortest and of the longest prompt where streams outnumber those of
    # transformers.
    mixed: tuple[int, int] = (16, 512)
    most_of_theirs: int = 8
    # Steps of decoding of a turn.
    steps: int = 16
    # Tokens of `contexts` that transformers computes together.
    their_chunk: int = 1024
    # A multiple of 640: nine tenths of it end a chunk of every recurrent layer.
    prefix_prompt: int = 2560
    # Tokens of the prompt of `prompt`, and of a step there.
    long_prompt: int = 6000
    chunk: int = 2048
    server_streams: int = 8
    # Tokens of each of them.
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


class Directories:
    """Models by their shape, each written once.

    Args:
        folder: An existing folder for all of them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, shape: Shape, dtype: str = "float32") -> Path:
        """The directory of a model, written if it is not there. Local.

        Args:
            shape: Shape of the model.
            dtype: Name of the dtype of its weights.
        """
        folder = self._folder / f"{shape.name}-{dtype}"
        if not folder.exists():
            import torch

            # The test support writes them; `pcomm bench` finds the benchmarks alone.
            sys.path.append(str(Path(__file__).parents[2] / "tests"))
            from integration_support.huggingface_directories import write_directory

            folder.mkdir()
            write_directory(folder, shape.family, dtype=getattr(torch, dtype), **shape.fields)
            write_plain_tokenizer(folder, shape.fields["vocab_size"])
        return folder
