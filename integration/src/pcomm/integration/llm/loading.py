"""A model that is ready to write, from the folder of a run or a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import tokenizers
import torch

from pcomm.core import Group
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.integration.checkpoint.folders import check_files, newest
from pcomm.integration.checkpoint.state import check_index, model_shard_views, read
from pcomm.integration.config.model_rules import resolve_model
from pcomm.integration.config.rules import check_shards, validate
from pcomm.integration.config.sections import ParallelConfig, ResolvedModel, ResolvedParallel
from pcomm.integration.config.toml import load_config
from pcomm.integration.data.tokenizer import BytePairTokenizer, load_tokenizer
from pcomm.integration.huggingface import (
    ChatTemplate,
    DirectoryTokenizer,
    load_weights,
    open_directory,
    read_chat_template,
    read_model,
    read_tokenizer,
)
from pcomm.integration.huggingface.chat_template import check_variables, plain_chat
from pcomm.integration.huggingface.directory import CONFIG, no_model
from pcomm.integration.huggingface.model_from import check_one_model, kept_directory
from pcomm.integration.huggingface.tensors import DTYPES, dtypes_of
from pcomm.integration.huggingface.tokenizer import (
    GENERATION,
    TOKENIZER,
    end_ids,
    vocabulary_json,
)
from pcomm.integration.llm.weight_form import WeightForm, weight_form
from pcomm.integration.models.initialisation import SkipInit
from pcomm.integration.models.language_model import LanguageModel

__all__ = [
    "LEAST_CONTEXT",
    "LoadedModel",
    "LoadedText",
    "PromptTokenizer",
    "RunTokenizer",
    "load_model",
    "load_text",
]

LEAST_CONTEXT = 2048
"""Longest sequence of a model that does not say what it was made for."""


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
        """The vocabulary as the content of a `tokenizer.json`."""
        ...


@dataclass(frozen=True)
class LoadedText:
    """What turns text into the tokens of a model and back, without its weights.

    Attributes:
        name: Name of the folder.
        tokenizer: The tokenizer of the model.
        chat_template: Template of conversations: its own, or `plain_chat`.
        chat_stop: Strings that end an answer beside the end tokens; for a model without a template.
        max_tokens: Longest sequence it was made for; for a run, the length it was trained with, and
            at least 2,048.
        vocabulary: Number of token ids, the width of its logits.
        generation: Content of its `generation_config.json`; empty if there is none.
        num_parameters: Number of parameters of the whole model, on all ranks together.
        dtype: Dtype of the weights in the folder, of most of them where there are several.
    """

    name: str
    tokenizer: PromptTokenizer
    chat_template: ChatTemplate
    chat_stop: tuple[str, ...]
    max_tokens: int
    vocabulary: int
    generation: Mapping[str, Any]
    num_parameters: int = field(kw_only=True)
    dtype: torch.dtype = field(kw_only=True)

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

    def chat_ids(
        self,
        messages: Sequence[dict[str, object]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation that ends where the answer begins. Local.

        Args:
            messages: Mappings with `role` and `content`.
            tools: Descriptions of functions, for the template; None for none.
            variables: More variables for the template.

        Raises:
            ConfigError: The template refuses the messages, a variable has a name of another, or a
                text is no Unicode.
        """
        check_variables(variables or {})
        text = self.chat_template.render(messages, tools=tools, **(variables or {}))
        check_unicode(text)
        return self.tokenizer.encode(text)


@dataclass(frozen=True)
class LoadedModel(LoadedText):
    """A model on this process, whole or this rank's part of it, with what it reads and writes.

    Attributes:
        model: The model, in evaluation mode.
    """

    model: LanguageModel


def load_model(
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    group: Group | None = None,
    quantization: str | None = None,
    batch_invariant: bool = False,
    most_rows: int | None = None,
) -> LoadedModel:
    """The model in a folder, whole or this rank's part of it, on this process. Local.

    Args:
        path: The `--out` folder of a `pcomm train`, of which the newest checkpoint is read; or a
            Hugging Face directory.
        dtype: Dtype of the weights; None for that of the directory, and fp32 for a run.
        device: Device of the model.
        group: Tensor-parallel group; None for the whole model.
        quantization: `int8` to keep the weights of linear layers as int8; None for their dtype. On
            a CPU they are packed then, so that the model is for inference alone.
        batch_invariant: True for weights in the form that an engine with `batch_invariant` wants.
        most_rows: Tokens of a step that only decodes, at most, for which weights get their form on
            a CPU; None if they are not known.

    Raises:
        ConfigError: The folder holds no model, the group cannot share its layers, its files are
            damaged, which names the file, or there is no such quantization.
        UnsupportedError: The model of the directory is not supported, or not with int8 weights, or
            not with `batch_invariant`.
    """
    ranks = 1 if group is None else group.size
    form = weight_form(
        quantization, device, batch_invariant=batch_invariant, ranks=ranks, most_rows=most_rows
    )
    source = _source(path)
    if batch_invariant and source.shape.experts:
        raise UnsupportedError(
            f"LLM({str(path)!r}): batch_invariant=True",
            found="a model with experts",
            why="The rows of an expert are the tokens of all requests that chose it, and the order "
            "of the sums of its products depends on their number.",
            fix="Leave batch_invariant out.",
        )
    if group is not None:
        check_ranks(path, source.shape, source.text.vocabulary, group.size)
    with SkipInit():
        model = LanguageModel(
            source.shape,
            source.text.vocabulary,
            None if group is None else group.collectives,
            device=device,
            dtype=dtype or source.text.dtype,
            initialise=False,
        )
    source.fill(model, group, form)
    if form is not None:
        # What was read as a whole, and a head that has no weight of its own beside the embedding's.
        form.replace(model, None)
    return LoadedModel(**vars(source.text), model=model.eval())


def load_text(path: Path, *, ranks: int = 1) -> LoadedText:
    """The tokenizer and the limits of the model in a folder; no weights are read. Local.

    Args:
        path: Folder as for `load_model`.
        ranks: Number of ranks that the model is to be shared by.

    Raises:
        ConfigError: The folder holds no model, or so many ranks cannot share its layers.
        UnsupportedError: The model of the directory is not supported.
    """
    source = _source(path)
    check_ranks(path, source.shape, source.text.vocabulary, ranks)
    return source.text


@dataclass(frozen=True)
class _Source:
    """A folder whose model can be built, and how its weights are read into it."""

    path: Path
    text: LoadedText
    shape: ResolvedModel
    fill: Callable[[LanguageModel, Group | None, WeightForm | None], object]


def _source(path: Path) -> _Source:
    check_one_model(path)
    return _directory(path) if (path / CONFIG).is_file() else _run(path)


def _directory(path: Path) -> _Source:
    directory = open_directory(path)
    found = read_model(directory)
    tokenizer, template = read_tokenizer(directory), read_chat_template(directory)
    longest, drawn = found.max_tokens or LEAST_CONTEXT, directory.json(GENERATION)
    # A dtype that is not read is refused with its tensor's name, when the weights are.
    dtype = DTYPES.get(dtypes_of(directory)["default"], torch.float32)
    shape = resolve_model(found.config)
    text = _text(path, tokenizer, template, longest, found.vocabulary, drawn, shape, dtype)

    def fill(model: LanguageModel, group: Group | None, form: WeightForm | None) -> None:
        filled = None if form is None else form.filled(model)
        load_weights(model, found.family, directory, ranks=_ranks(group), filled=filled)

    return _Source(path, text, shape, fill)


def _run(path: Path) -> _Source:
    checkpoint = newest(path) if path.is_dir() else None
    if checkpoint is None:
        raise no_model(path)
    config = validate(replace(load_config(path / "config.toml"), parallel=ParallelConfig()), 1)
    longest = max(config.train.sequence_length, LEAST_CONTEXT)
    tokenizer, template, drawn = _run_text(path)

    def fill(model: LanguageModel, group: Group | None, form: WeightForm | None) -> None:
        check_index(checkpoint)
        # Whole files, of which each rank reads its share.
        place = {} if group is None else {"rank": group.rank, "size": group.size}
        check_files(checkpoint, **place)
        read(checkpoint, model_shard_views(model, _ranks(group)))

    of_model = config.data.vocabulary, drawn, config.model, torch.float32
    return _Source(path, _text(path, tokenizer, template, longest, *of_model), config.model, fill)


def _run_text(path: Path) -> tuple[PromptTokenizer, ChatTemplate | None, dict[str, Any]]:
    kept = kept_directory(path)
    if kept is None:
        return RunTokenizer(load_tokenizer(path / TOKENIZER)), None, {}
    # As the directory's own, which knows special tokens in the text of a template.
    own = tokenizers.Tokenizer.from_file(str(path / TOKENIZER))
    own.no_truncation()
    own.no_padding()
    tokenizer = DirectoryTokenizer(own, end_ids(kept, own))
    return tokenizer, read_chat_template(kept), kept.json(GENERATION)


def _ranks(group: Group | None) -> Mapping[str, int] | None:
    """Rank of this process by the scope of `ParamLayout`. Each rank of a group has all experts."""
    return None if group is None else {"dense": group.rank, "expert": 0}


def _text(
    path: Path,
    tokenizer: PromptTokenizer,
    template: ChatTemplate | None,
    max_tokens: int,
    vocabulary: int,
    generation: Mapping[str, Any],
    shape: ResolvedModel,
    dtype: torch.dtype,
) -> LoadedText:
    plain, stop = plain_chat()
    with SkipInit():
        described = LanguageModel(shape, vocabulary, device="meta", initialise=False)
    return LoadedText(
        path.resolve().name,
        tokenizer,
        template or plain,
        () if template else stop,
        max_tokens,
        vocabulary,
        generation,
        num_parameters=described.num_parameters(),
        dtype=dtype,
    )


def check_ranks(path: Path, shape: ResolvedModel, vocabulary: int, ranks: int) -> None:
    """Refuse ranks that cannot share a model, and say which can. Local; nothing is read.

    Args:
        path: Folder of the model, for the message.
        shape: Shape of the model.
        vocabulary: Number of token ids.
        ranks: Number of ranks, at least 1.

    Raises:
        ConfigError: Heads, key and value heads, the width of the MLP or the vocabulary is no
            multiple of `ranks`.
    """
    cause = _unshared(shape, vocabulary, ranks)
    if cause is None:
        return
    # The rows of the embedding are shared too, so no other number can do.
    divisors = [number for number in range(1, vocabulary + 1) if vocabulary % number == 0]
    fitting = [number for number in divisors if _unshared(shape, vocabulary, number) is None]
    raise ConfigError(
        f"model {path}: --ranks {ranks}",
        found=cause.found.replace("parallel.tp", "the number of ranks"),
        why=cause.why.replace("Each rank of tp", "Each rank"),
        fix=f"Give --ranks one of {', '.join(map(str, fitting))}.",
    )


def _unshared(shape: ResolvedModel, vocabulary: int, ranks: int) -> ConfigError | None:
    """The reason why so many ranks cannot share the layers; None if they can."""
    try:
        check_shards(shape, vocabulary, ResolvedParallel(tp=ranks, dp=1, shard_ranks=1))
    except ConfigError as error:
        return error
    return None


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


class RunTokenizer:
    """Text to token ids and back with the tokenizer that `pcomm train` has made.

    Args:
        tokenizer: Tokenizer of the run.
    """

    def __init__(self, tokenizer: BytePairTokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Id of the end of a document."""
        return self._tokenizer.eos_ids

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; names of special tokens in it are text like any other."""
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens give none."""
        return self._tokenizer.decode(ids)

    def to_json(self) -> str:
        """The vocabulary as `tokenizer.json`, see `vocabulary_json`."""
        return vocabulary_json(self._tokenizer.to_json())
