"""Models of transformers that no family of pcomm has: of a directory, or in the caller's memory.

pcomm's own families are faster on a CPU, have int8 weights and are shared by ranks, so a directory
that one of them reads is theirs. Every other causal language model of transformers runs unchanged,
by `TransformersModel` of pcomm.inference.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
import torch

from pcomm.core import Group
from pcomm.core.errors import ConfigError, PcommError, UnsupportedError
from pcomm.inference import TransformersModel
from pcomm.inference.roofline import StepWeights
from pcomm.integration.huggingface import (
    ChatTemplate,
    DirectoryTokenizer,
    open_directory,
    read_chat_template,
    read_model,
    read_tokenizer,
)
from pcomm.integration.huggingface.chat_template import plain_chat, special_tokens
from pcomm.integration.huggingface.directory import CONFIG
from pcomm.integration.huggingface.model_from import check_one_model
from pcomm.integration.huggingface.tokenizer import GENERATION
from pcomm.integration.llm.loading import (
    LEAST_CONTEXT,
    LoadedModel,
    LoadedText,
    load_model,
    load_text,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["ForeignModel", "LoadedForeign", "adopt", "load_for_engine", "load_text_for_engine"]

_log = logging.getLogger("pcomm.llm")

# Names that configurations have for the longest text, where it is none of transformers' own.
_LENGTHS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "seq_length")


class ForeignModel(TransformersModel):
    """A model of transformers, with what `LLM` asks beside `Model`; see `TransformersModel`."""

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        found: torch.device = self.model.device
        return found

    def step_weights(self) -> StepWeights:
        """Bytes of weights that a step reads, with those of all experts. Local."""
        return StepWeights.of(self.model)


@dataclass(frozen=True)
class LoadedForeign(LoadedText):
    """A model of transformers on this process, with what it reads and writes.

    Attributes:
        model: The model, in evaluation mode until it is closed.
    """

    model: ForeignModel


def load_for_engine(
    path: Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    group: Group | None,
    quantization: str | None,
    batch_invariant: bool,
    most_rows: int,
) -> LoadedModel | LoadedForeign:
    """The model in a folder: pcomm's own where it has the family, else transformers'. Local.

    Args:
        path: Folder as for `load_model`, or a Hugging Face directory of any causal language model.
        dtype: Dtype of the weights; None for that of the directory, and fp32 for a run.
        device: Device of the model.
        group: Tensor-parallel group; None for the whole model.
        quantization: Form of the weights, as for `load_model`.
        batch_invariant: The argument of `load_model`.
        most_rows: Tokens of a step that only decodes, at most.

    Raises:
        ConfigError: The folder holds no model, or its files are damaged.
        UnsupportedError: Neither pcomm nor transformers has the model, or it is a model of
            transformers and an argument asks for what only pcomm's own have.
    """
    reason = _not_ours(path)
    if reason is None:
        return load_model(
            path,
            dtype=dtype,
            device=device,
            group=group,
            quantization=quantization,
            batch_invariant=batch_invariant,
            most_rows=most_rows,
        )
    ranks = 1 if group is None else group.size
    check_plain(f"LLM({str(path)!r})", ranks, quantization, batch_invariant)
    config, text = _described(path, reason)
    # Weights stay as they are: code of a model may use that of a layer beside the layer, and torch
    # multiplies with what packing leaves of it, a tensor without memory, without an error.
    adapter = ForeignModel(_read(path, config, dtype).to(device))  # type: ignore[arg-type]
    _log.info("%s runs by transformers' %s: %s", path, type(adapter.model).__name__, reason.found)
    return _loaded(replace(text, vocabulary=adapter.vocabulary), adapter)


def load_text_for_engine(path: Path, *, ranks: int = 1) -> LoadedText:
    """The tokenizer and the limits of the model in a folder; no weights are read. Local.

    Args:
        path: Folder as for `load_for_engine`.
        ranks: Number of ranks that the model is to be shared by.

    Raises:
        ConfigError: The folder holds no model, or so many ranks cannot share its layers.
        UnsupportedError: For the reasons of `load_for_engine`.
    """
    reason = _not_ours(path)
    if reason is None:
        return load_text(path, ranks=ranks)
    check_plain(f"LLM({str(path)!r})", ranks, None, False)
    return _described(path, reason)[1]


def adopt(model: object, tokenizer: object) -> LoadedForeign:
    """A model in memory, which stays the caller's, and its tokenizer. Local.

    Args:
        model: A causal language model of transformers.
        tokenizer: A fast tokenizer of transformers; it is copied.

    Raises:
        ConfigError: One of them is something else, or the model is refused; it is as it was then.
        UnsupportedError: transformers is not installed.
    """
    rust = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(rust, tokenizers.Tokenizer):
        fix = "Pass `tokenizer=AutoTokenizer.from_pretrained(NAME)` of transformers."
        if isinstance(tokenizer, tokenizers.Tokenizer):
            fix = "Pass `PreTrainedTokenizerFast(tokenizer_object=...)` of transformers around it."
        raise ConfigError(
            "LLM: tokenizer",
            found="None" if tokenizer is None else f"a {type(tokenizer).__name__}",
            why="A model in memory has no tokenizer of its own, and that of transformers says "
            "which tokens end a text.",
            fix=fix,
        )
    adapter = ForeignModel(model)  # type: ignore[arg-type]  # which is what it checks first
    own = tokenizers.Tokenizer.from_str(rust.to_str())
    own.no_truncation()
    own.no_padding()
    config = adapter.model.config
    name = Path(config.name_or_path or type(adapter.model).__name__).name
    text = _text(
        name,
        config,
        DirectoryTokenizer(own, _ends(adapter.model, tokenizer)),
        _template(tokenizer),
        adapter.vocabulary,
        adapter.model.generation_config.to_diff_dict(),
    )
    return _loaded(text, adapter)


def _loaded(text: LoadedText, adapter: ForeignModel) -> LoadedForeign:
    longest = min(text.max_tokens, adapter.max_tokens or text.max_tokens)
    weights = list(adapter.model.parameters())
    num_parameters = sum(one.numel() for one in weights)
    text = replace(text, max_tokens=longest, num_parameters=num_parameters, dtype=weights[0].dtype)
    return LoadedForeign(**vars(text), model=adapter)


def check_plain(asked: str, ranks: int, quantization: str | None, batch_invariant: bool) -> None:
    """Refuse for a model of transformers what only pcomm's own families have. Local.

    Args:
        asked: Call that asks for the model, for the error.
        ranks: Number of ranks that are to share the model.
        quantization: Form of the weights, such as `int8`; None for that of the model.
        batch_invariant: True if a row is to have the same bits whatever rows are beside it.

    Raises:
        UnsupportedError: It is not for a model of transformers.
    """
    if ranks > 1:
        found, fix = f"{ranks} ranks", "Leave the ranks out."
        why = "Each rank would hold a part of every layer, and its layers are not cut."
    elif quantization is not None:
        found, fix = f"quantization={quantization!r}", "Leave the quantization out."
        why = "Which of its layers stand int8 weights is known of pcomm's own families alone."
    elif batch_invariant:
        found, fix = "batch_invariant=True", "Leave batch_invariant out."
        why = "The order of the sums in its own layers may depend on the number of rows."
    else:
        return
    raise UnsupportedError(
        asked,
        found=f"{found}, and a model that runs by transformers",
        why=why,
        fix=f"{fix} Models of pcomm's own families have it.",
    )


def _not_ours(path: Path) -> UnsupportedError | None:
    """The reason why no family of pcomm has the model of a directory; None if one has it."""
    check_one_model(path)
    if not (path / CONFIG).is_file():
        return None
    try:
        read_model(open_directory(path))
    except UnsupportedError as error:
        return error
    return None


def _described(path: Path, reason: UnsupportedError) -> tuple[PreTrainedConfig, LoadedText]:
    """The configuration of a causal language model of transformers, and what surrounds it."""
    directory = open_directory(path)
    try:
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
        from transformers import __version__ as version
    except ImportError as error:
        raise UnsupportedError(
            reason.asked,
            found=reason.found,
            why=f"{reason.why} transformers is not installed ({error}), which has more of them.",
            fix=f"{reason.fix} Or `python3 -m pip install 'transformers>=5.23'`.",
        ) from error
    kind, classes = directory.config.get("model_type"), directory.config.get("architectures")
    asked = f"model directory {path}"
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        programs = directory.config.get("auto_map")
        raise UnsupportedError(
            asked,
            found=f"model_type {kind!r:.100}"
            + (f", with programs: {programs}" if programs else ""),
            why=f"Neither pcomm nor transformers {version} has such a model"
            + (", and programs of a directory (remote code) are never run." if programs else "."),
            fix="Install a transformers that has it, or load it yourself and pass "
            "`LLM(model=..., tokenizer=...)`.",
        )
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each configuration checks its fields in its own way
        raise ConfigError(
            asked,
            found=f"{CONFIG}: {error}",
            why=f"transformers {version} cannot read it.",
            fix=f"Copy {CONFIG} again from where the directory came from.",
        ) from error
    mapped: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), ())
    names = [one.__name__ for one in (mapped if isinstance(mapped, tuple) else (mapped,))]
    if not names or (classes and not set(classes) & set(names)):
        raise UnsupportedError(
            asked,
            found=f"architectures {classes!r:.100} of model_type {kind!r}",
            why=f"transformers {version} has "
            + (f"{' and '.join(names)}, a causal" if names else "no causal")
            + " language model, for it; another head would be missing its weights.",
            fix="Give the directory of a causal language model.",
        )
    vocabulary = config.get_text_config().vocab_size
    tokenizer, template = read_tokenizer(directory), read_chat_template(directory)
    drawn = directory.json(GENERATION)
    return config, _text(path.resolve().name, config, tokenizer, template, vocabulary, drawn)


def _read(path: Path, config: PreTrainedConfig, dtype: torch.dtype | None) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    asked = f"model directory {path}"
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model, report = load(
            path,
            config=config,
            dtype=dtype or "auto",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except PcommError:
        raise
    except Exception as error:  # damaged files, packages for quantised weights, and more
        raise UnsupportedError(
            asked,
            found=f"{type(error).__name__}: {error}",
            why="transformers cannot load it.",
            fix="Load it with AutoModelForCausalLM.from_pretrained, and mend what that says.",
        ) from error
    absent = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
    if absent:
        raise ConfigError(
            asked,
            found=f"no tensor {absent[0]} of the shape that {CONFIG} describes, "
            f"and {len(absent) - 1} others are missing",
            why="transformers fills such weights with random numbers.",
            fix="Copy the files again from where the directory came from, config.json included.",
        )
    if more := sorted(report["unexpected_keys"]):
        _log.warning(
            "%s: transformers does not use %d tensors, such as %s", path, len(more), more[0]
        )
    found: PreTrainedModel = model.eval()
    return found


def _text(
    name: str,
    config: PreTrainedConfig,
    tokenizer: DirectoryTokenizer,
    template: ChatTemplate | None,
    vocabulary: int,
    generation: Mapping[str, Any],
) -> LoadedText:
    inner = config.get_text_config()
    lengths = [getattr(inner, one, None) for one in _LENGTHS]
    longest = next((one for one in lengths if isinstance(one, int) and one > 0), LEAST_CONTEXT)
    plain, stop = plain_chat()
    return LoadedText(
        name,
        tokenizer,
        template or plain,
        () if template else stop,
        longest,
        vocabulary,
        generation,
        # Known of the model itself.
        num_parameters=0,
        dtype=torch.float32,
    )


def _ends(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a text, by the first that says one, as for a directory."""
    for holder in (model.generation_config, model.config, tokenizer):
        found = getattr(holder, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list | tuple) else (int(found),)
    return ()


def _template(tokenizer: Any) -> ChatTemplate | None:
    source, tool_source = getattr(tokenizer, "chat_template", None), None
    if isinstance(source, dict):
        tool_source, source = source.get("tool_use"), source.get("default")
    if source is None:
        return None
    marks = special_tokens({name: str(one) for name, one in tokenizer.special_tokens_map.items()})
    return ChatTemplate(source, marks, where="of the tokenizer", tool_source=tool_source)
