"""A model that is ready to write: from a run of `pcomm train`, or from a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import tokenizers
import torch

from pcomm.core import Group
from pcomm.core.errors import ConfigError
from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pcomm.inference.layers import pack_weights
from pcomm.integration.checkpoint.checksums import check_files
from pcomm.integration.checkpoint.folders import newest
from pcomm.integration.checkpoint.reader import check_index, read
from pcomm.integration.checkpoint.state import model_shard_views
from pcomm.integration.config import ParallelConfig
from pcomm.integration.config_file import load_config
from pcomm.integration.config_resolved import ResolvedModel, ResolvedParallel
from pcomm.integration.config_rules import check_shards, validate
from pcomm.integration.data.tokenizer import load_tokenizer
from pcomm.integration.huggingface import (
    ChatTemplate,
    DirectoryTokenizer,
    load_weights,
    open_directory,
    read_chat_template,
    read_model,
    read_tokenizer,
)
from pcomm.integration.huggingface.directory import ModelDirectory
from pcomm.integration.huggingface.dtypes import DTYPES, dtypes_of
from pcomm.integration.huggingface.families.family import Family
from pcomm.integration.huggingface.run_files import kept_directory
from pcomm.integration.huggingface.tokenizer import TOKENIZER, end_ids
from pcomm.integration.llm.plain_chat import plain_chat
from pcomm.integration.llm.quantization import Quantizer, quantizer
from pcomm.integration.llm.run_tokenizer import RunTokenizer
from pcomm.integration.model_rules import resolve_model
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.models.without_draws import WithoutDraws

__all__ = ["LoadedModel", "PromptTokenizer", "load_model"]

_CONFIG = "config.json"
# A model says how long its context is; one that does not is a run, or has no limit.
_LEAST_CONTEXT = 2048


class PromptTokenizer(Protocol):
    """A tokenizer that the engine can use, and that shows its vocabulary."""

    @property
    def eos_ids(self) -> Sequence[int]:
        """Token ids by which the model ends a text."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without marks around it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        ...

    def to_json(self) -> str:
        """The content of `tokenizer.json`."""
        ...


@dataclass(frozen=True)
class LoadedModel:
    """A whole model on one process, with what turns text into its tokens and back.

    Attributes:
        name: Name of the folder.
        model: The model, in evaluation mode.
        tokenizer: Its tokenizer.
        chat_template: Template of conversations: its own, or `plain_chat`.
        chat_stop: Strings that end an answer beside the end tokens; for a model without a template.
        max_tokens: Longest sequence it was made for; for a run, the length it was trained with, and
            at least 2,048.
        vocabulary: Number of token ids, the width of its logits.
    """

    name: str
    model: LanguageModel
    tokenizer: PromptTokenizer
    chat_template: ChatTemplate
    chat_stop: tuple[str, ...]
    max_tokens: int
    vocabulary: int

    def prompt_ids(self, text: str) -> list[int]:
        """Token ids of a prompt, with the marks that the model wants around it. Local.

        Raises:
            ConfigError: The text is no Unicode; or it has no tokens, and the model no mark that a
                text begins with.
        """
        check_unicode(text)
        tokenizer = self.tokenizer
        if isinstance(tokenizer, DirectoryTokenizer):
            ids = tokenizer.encode_prompt(text)
        else:
            ids = tokenizer.encode(text)
        # A text without a begin starts like one behind the end of another.
        ids = ids or list(tokenizer.eos_ids[:1])
        if not ids:
            raise ConfigError(
                "prompt",
                found="no text, and a model without end tokens",
                why="The first token to write needs the logits of a token before it.",
                fix="Give a prompt of at least one token.",
            )
        return ids

    def chat_ids(self, messages: Sequence[dict[str, object]]) -> list[int]:
        """Token ids of a conversation that ends where the answer begins. Local.

        Args:
            messages: Mappings with `role` and `content`.

        Raises:
            ConfigError: The template refuses the messages, or a text is no Unicode.
        """
        text = self.chat_template.render(messages)
        check_unicode(text)
        return self.tokenizer.encode(text)


def load_model(
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    group: Group | None = None,
    quantization: str | None = None,
) -> LoadedModel:
    """The model in a folder, whole or this rank's part of it, on this process. Local.

    Args:
        path: The `--out` folder of a `pcomm train`, of which the newest checkpoint is read; or a
            Hugging Face directory.
        dtype: Dtype of the weights; None for that of the directory, and fp32 for a run.
        device: Device of the model.
        group: Tensor-parallel group; None for the whole model.
        quantization: `int8` to keep the weights of linear layers as int8; None for their dtype.

    Raises:
        ConfigError: The folder holds no model, the group cannot share its layers, its files are
            damaged, which names the file, or there is no such quantization.
        UnsupportedError: The model of the directory is not supported, or not with int8 weights.
    """
    quantize = quantizer(quantization, device)
    if (path / _CONFIG).is_file():
        return _from_directory(path, dtype, device, group, quantize)
    return _from_run(path, dtype, device, group, quantize)


def check_unicode(text: str) -> None:
    """Refuse a text that no tokenizer reads. Local.

    Raises:
        ConfigError: It has halves of surrogate pairs, as JSON can write them.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(
            "prompt",
            found="half of a surrogate pair, or bytes that are no UTF-8",
            why="It stands for no character, and a tokenizer reads characters.",
            fix="Send the text as UTF-8, or both halves of the pair.",
        )


def _from_directory(
    path: Path,
    dtype: torch.dtype | None,
    device: torch.device | str,
    group: Group | None,
    quantize: Quantizer | None,
) -> LoadedModel:
    directory = open_directory(path)
    found = read_model(directory)
    tokenizer = read_tokenizer(directory)
    template = read_chat_template(directory)
    if dtype is None:
        # One that is not read is refused with its tensor's name, below.
        dtype = DTYPES.get(dtypes_of(directory)["default"], torch.float32)
    config = resolve_model(found.config)
    model = _empty(path, config, found.vocabulary, dtype, device, group)
    ranks = _ranks(group)
    if quantize is None:
        load_weights(model, found.family, directory, ranks=ranks)
    else:
        _load_quantized(model, quantize, found.family, directory, ranks)
    return _loaded(path, model, tokenizer, template, found.max_tokens or _LEAST_CONTEXT)


def _from_run(
    path: Path,
    dtype: torch.dtype | None,
    device: torch.device | str,
    group: Group | None,
    quantize: Quantizer | None,
) -> LoadedModel:
    checkpoint = newest(path) if path.is_dir() else None
    if checkpoint is None:
        raise ConfigError(
            f"model {path}",
            found="neither a checkpoint of a run nor a config.json"
            if path.is_dir()
            else "no such folder",
            why="A model is a run of `pcomm train` that has been saved, or a Hugging Face "
            "directory.",
            fix="Give the --out folder of a `pcomm train` that has reached a checkpoint, or a "
            "directory with config.json, tokenizer.json and safetensors.",
        )
    config = validate(replace(load_config(path / "config.toml"), parallel=ParallelConfig()), 1)
    model = _empty(
        path, config.model, config.data.vocabulary, dtype or torch.float32, device, group
    )
    check_index(checkpoint)
    check_files(checkpoint)
    read(checkpoint, model_shard_views(model, _ranks(group)))
    if quantize is not None:
        quantize(model, None)
    longest = max(config.train.sequence_length, _LEAST_CONTEXT)
    kept = kept_directory(path)
    if kept is None:
        tokenizer = RunTokenizer(load_tokenizer(path / TOKENIZER))
        return _loaded(path, model, tokenizer, None, longest)
    # As the directory's own, which knows special tokens in the text of a template.
    own = tokenizers.Tokenizer.from_file(str(path / TOKENIZER))
    own.no_truncation()
    own.no_padding()
    theirs = DirectoryTokenizer(own, end_ids(kept, own))
    return _loaded(path, model, theirs, read_chat_template(kept), longest)


def _load_quantized(
    model: LanguageModel,
    quantize: Quantizer,
    family: Family,
    directory: ModelDirectory,
    ranks: Mapping[str, int] | None,
) -> None:
    """Quantise each layer as soon as its weight is there, in memory that all of them share."""
    layers = [m for m in model.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)]
    # A head that is tied has the embedding's weight, which stays.
    weights = [layer.weight for layer in layers if layer.weight is not model.embedding.weight]
    shared = model.norm.weight.new_empty(max(weight.numel() for weight in weights))
    for weight in weights:
        weight.data = shared[: weight.numel()].view(weight.shape)
    del layers, weights

    def filled(name: str) -> None:
        quantize(model, name.rpartition(".")[0])

    load_weights(model, family, directory, ranks=ranks, filled=filled)
    # The head has no weight of its own where it is the embedding's.
    quantize(model, "head")


def _empty(
    path: Path,
    config: ResolvedModel,
    vocabulary: int,
    dtype: torch.dtype,
    device: torch.device | str,
    group: Group | None,
) -> LanguageModel:
    """The model before its weights are read. Each rank of a group has all experts."""
    if group is not None:
        _check_ranks(path, config, vocabulary, group.size)
    collectives = None if group is None else group.collectives
    with WithoutDraws():
        return LanguageModel(
            config, vocabulary, collectives, device=device, dtype=dtype, initialise=False
        )


def _check_ranks(path: Path, config: ResolvedModel, vocabulary: int, size: int) -> None:
    """Refuse ranks that cannot share the model, and say which can: its shape is given."""
    cause = _unshared(config, vocabulary, size)
    if cause is None:
        return
    # The rows of the embedding are shared too, so no other number can do.
    divisors = [ranks for ranks in range(1, vocabulary + 1) if vocabulary % ranks == 0]
    fitting = [ranks for ranks in divisors if _unshared(config, vocabulary, ranks) is None]
    raise ConfigError(
        f"model {path}: --ranks {size}",
        found=cause.found.replace("parallel.tp", "the number of ranks"),
        why=cause.why.replace("Each rank of tp", "Each rank"),
        fix=f"Give --ranks one of {', '.join(map(str, fitting))}.",
    )


def _unshared(config: ResolvedModel, vocabulary: int, size: int) -> ConfigError | None:
    """The reason why so many ranks cannot share the layers; None if they can."""
    try:
        check_shards(config, vocabulary, ResolvedParallel(tp=size, dp=1, shard_ranks=1))
    except ConfigError as error:
        return error
    return None


def _ranks(group: Group | None) -> dict[str, int] | None:
    """Rank of this process by the scope of `ParamLayout`."""
    return None if group is None else {"dense": group.rank, "expert": 0}


def _loaded(
    path: Path,
    model: LanguageModel,
    tokenizer: PromptTokenizer,
    template: ChatTemplate | None,
    max_tokens: int,
) -> LoadedModel:
    plain, stop = plain_chat()
    # Only large weights on a CPU; `state_dict` of the model is refused from here on.
    pack_weights(model)
    return LoadedModel(
        path.resolve().name,
        model.eval(),
        tokenizer,
        template or plain,
        () if template else stop,
        max_tokens,
        model.vocabulary.length,
    )
