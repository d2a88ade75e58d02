"""A causal language model of transformers, unchanged, as a model of the engine.

The library looks attention up by a name, and hands a cache object to each layer that keeps a state.
So nothing in the model is copied or rewritten: within a step its attention is `paged_attention`,
and each recurrent layer runs once for all requests that decode, and by chunks or single tokens for
others, with a cache that stands for the slots of the engine. Between steps the model is as it was.

What each layer keeps is found by a run of a few tokens. Another one compares the logits of the
engine's way, in chunks and with two requests, with those of the model's own forward: where they
differ the model is refused, since it would write wrong text without an error.
"""

# Shape suffixes: T tokens of a step, L rows of logits, V token ids.

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count, pairwise
from threading import RLock
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.inference.model import LayerMemory, LayerSpec, StepBatch
from pcomm.inference.transformers.attention_calls import AttentionCalls
from pcomm.inference.transformers.recurrent_layers import RecurrentLayer, find_recurrent_layers
from pcomm.inference.transformers.self_check import check_logits, without_padding

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["TransformersModel"]

_NUMBERS = count()
# Tokens of the runs in which calls and states are found: hardly a size of a layer is as large.
_NUM_TOKENS = 11
# A step puts a name into configurations, which models may share: one computes at a time. By the id
# of a configuration, which lives as long as an adapter that has its lock.
_TURNS: WeakValueDictionary[int, Any] = WeakValueDictionary()
_MAKING = RLock()


class TransformersModel:
    """A causal language model of transformers, unchanged, as a model of the engine.

    Its weights are not copied, and may change between steps, in which it can be used as ever. Steps
    compute no gradients. Those of adapters in other threads whose models share a configuration wait
    for each other. Local; under tensor parallelism every rank has its own.

    Args:
        model: A causal language model on one device, whose attention goes through transformers'
            `AttentionInterface`. It is put in evaluation mode. Weights can be packed or quantised
            once the adapter is made, not before.
        check: False to skip the comparison with the model's own forward. Recurrent layers take
            chunks of a prompt token by token then, behind the first one.

    Attributes:
        model: The model.
        vocabulary: Number of logits of a token.
        max_tokens: Most tokens of a text that the model rotates by one table, where rotary
            positions depend on the longest text of a forward pass (`dynamic`, `longrope`); None
            elsewhere. Give it to the engine as `max_model_len`, or less.

    Raises:
        UnsupportedError: transformers is not installed.
        ConfigError: This is no causal language model of transformers, weights of it were packed or
            quantised before, a layer keeps or asks for what the engine does not have, or the logits
            of the engine's way are not those of the model's own forward. The model is as it was
            then.

    Source:
        `AttentionInterface`, `AttentionMaskInterface` and `Cache` of transformers 5.23.
    """

    def __init__(self, model: PreTrainedModel, *, check: bool = True) -> None:
        _check_kind(model)
        self.model = model
        self._parameters = inspect.signature(model.forward).parameters
        self._in_training = [module for module in model.modules() if module.training]
        self._calls = AttentionCalls(f"pcomm_{next(_NUMBERS)}")
        self._recurrent: tuple[RecurrentLayer, ...] = ()
        self._first_position = 0
        self._is_closed = False
        self._configs = tuple(_configs_of(model))
        self._turns = _turns_of(self._configs)
        self.max_tokens = _tokens_of_one_rotation(self._configs)
        for module in self._in_training:
            module.training = False
        try:
            with self._in_turn():
                self._find()
                if check:
                    check_logits(self, model, self._logits_alone, self._recurrent)
        except BaseException as error:
            self.close()
            if not isinstance(error, Exception) or isinstance(error, _PASSED_ON):
                raise
            found = f"{type(error).__name__}: {str(error).strip().partition(_LINE)[0]}"
            raise _refused(model, found, "It fails in a forward pass of the engine.") from error

    def _find(self) -> None:
        """What each layer keeps, by a run of some tokens."""
        embeddings: Any = self.model.get_input_embeddings()
        tokens_T = torch.arange(1, 1 + _NUM_TOKENS, device=self.model.device)
        tokens_T = without_padding(tokens_T % embeddings.num_embeddings, self.model)
        with self._plugged_in(), self._calls.being_found():
            self.vocabulary = self._forward(tokens_T).shape[1]
        self._recurrent = tuple(find_recurrent_layers(self.model, tokens_T))
        self._find_first_position(tokens_T)
        if not self.memory_specs():
            raise _refused(
                self.model,
                "no call of attention by name, and no layer that keeps a state in its cache",
                "What it keeps of a text cannot be found.",
            )

    def _find_first_position(self, tokens_T: Tensor) -> None:
        """The position of a first token: some families begin behind that of their padding."""
        padding = getattr(self.model.config, "pad_token_id", None)
        if isinstance(padding, int) and "position_ids" in self._parameters:
            alone, positions_T = self._logits_alone(tokens_T), torch.arange(_NUM_TOKENS)
            for first in (0, padding + 1):
                self._first_position = first
                if torch.equal(self._forward(tokens_T, positions_T.to(tokens_T)), alone):
                    return
        self._first_position = 0

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "TransformersModel: a copy of it",
            found="a function that copies or pickles it, such as copy.deepcopy",
            why="It holds functions and locks of the model that it was made for.",
            fix="Copy the model, and make another TransformersModel of the copy.",
        )

    def close(self) -> None:
        """End its use, and put modules back in training mode. It can be closed again."""
        if not self._is_closed:
            self._is_closed = True
            for module in self._in_training:
                module.training = True

    def memory_specs(self) -> Sequence[LayerSpec]:
        """What each call of attention keeps, in their order, then each recurrent layer. Local."""
        return [*self._calls.specs, *(layer.spec for layer in self._recurrent)]

    def step(self, batch: StepBatch, memory: Sequence[LayerMemory | None]) -> Tensor:
        """Logits `[L, V]`, see `Model.step`.

        Raises:
            ConfigError: The adapter is closed, the model is in training mode, a text is longer than
                `max_tokens`, or the model does not call its attention as it did when it was loaded.
        """
        self._check_step(batch)
        number = len(self._calls.specs)
        with self._in_turn() as stack:
            stack.enter_context(self._plugged_in())
            stack.enter_context(self._calls.serving(batch, memory[:number]))
            for layer, kept in zip(self._recurrent, memory[number:], strict=True):
                stack.enter_context(layer.serving(batch, kept))
            return self._forward(batch.tokens_T, batch.positions_T, batch.logits_rows)

    def _check_step(self, batch: StepBatch) -> None:
        if self._is_closed:
            raise ConfigError(
                "TransformersModel.step",
                found="an adapter that is closed",
                why="Its model belongs to its owner again.",
                fix="Close the engine before the adapter, or make another one.",
            )
        if self.model.training:
            raise ConfigError(
                "TransformersModel.step",
                found="the model in training mode",
                why="Its dropout would change the text.",
                fix="Call model.eval() before the engine goes on.",
            )
        if self.max_tokens is None:
            return
        news = (stop - start for start, stop in pairwise(batch.cu_seqlens))
        longest = max(old + new for old, new in zip(batch.context_lens, news, strict=True))
        if longest > self.max_tokens:
            raise ConfigError(
                f"TransformersModel.step: a text of {longest} tokens",
                found=f"rotary positions that change for all of a text beyond {self.max_tokens}",
                why="Keys in memory are rotated already, and other requests share the table.",
                fix=f"Give the engine max_model_len={self.max_tokens}.",
            )

    def _logits_alone(self, tokens_T: Tensor) -> Tensor:
        """Logits `[T, V]` of one text by the model's own forward, at its own positions. Local."""
        return self._forward(tokens_T)

    def _forward(
        self, tokens_T: Tensor, positions_T: Tensor | None = None, rows_L: Tensor | None = None
    ) -> Tensor:
        given: dict[str, Any] = {"input_ids": tokens_T[None], "use_cache": False}
        if positions_T is not None and "position_ids" in self._parameters:
            given["position_ids"] = positions_T[None] + self._first_position
        keeps = rows_L is not None and "logits_to_keep" in self._parameters
        if keeps:
            given["logits_to_keep"] = rows_L
        with torch.no_grad():
            found = getattr(self.model(**given), "logits", None)
        if found is None or found.dim() != 3:
            raise _refused(self.model, "no logits of each token", "The engine samples from them.")
        logits: Tensor = found[0]
        return logits if keeps or rows_L is None else logits[rows_L]

    @contextmanager
    def _in_turn(self) -> Iterator[ExitStack]:
        """No other adapter computes with the configurations of this model."""
        with ExitStack() as stack:
            for turn in self._turns:
                stack.enter_context(turn)
            yield stack

    @contextmanager
    def _plugged_in(self) -> Iterator[None]:
        """The attention of the model is ours."""
        formers = [config._attn_implementation_internal for config in self._configs]
        with self._calls.registered():
            try:
                for config in self._configs:
                    config._attn_implementation_internal = self._calls.name
                yield
            finally:
                for config, former in zip(self._configs, formers, strict=True):
                    config._attn_implementation_internal = former


_PASSED_ON = (ConfigError, UnsupportedError, torch.OutOfMemoryError)
_LINE = "\n"


def _configs_of(model: PreTrainedModel) -> Iterator[PreTrainedConfig]:
    """The configurations in which a module may look up the name of its attention."""
    from transformers import PreTrainedConfig

    found: set[int] = set()
    left = [getattr(module, "config", None) for module in model.modules()]
    while left:
        config = left.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found.add(id(config))
            yield config
            left += [getattr(config, name, None) for name in config.sub_configs]


def _turns_of(configs: Iterable[PreTrainedConfig]) -> list[Any]:
    """The locks of configurations, in an order that is the same for all adapters."""
    with _MAKING:
        return [_TURNS.setdefault(key, RLock()) for key in sorted(map(id, configs))]


def _tokens_of_one_rotation(configs: Iterable[PreTrainedConfig]) -> int | None:
    """Most tokens of a text before rotary positions depend on how many there are; None for all."""
    limits = []
    for config in configs:
        found = getattr(config, "rope_parameters", None) or {}
        for entry in (found, *found.values()):
            kind = entry.get("rope_type") if isinstance(entry, dict) else None
            if kind == "longrope":
                limits.append(entry["original_max_position_embeddings"])
            elif kind is not None and "dynamic" in kind:
                limits.append(config.max_position_embeddings)
    return min(limits, default=None)


def _check_kind(model: nn.Module) -> None:
    """Whether this is one text model of transformers on one device, with its attention by name."""
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise UnsupportedError(
            "TransformersModel",
            found=f"no transformers ({error})",
            why="It runs models of transformers.",
            fix="python3 -m pip install 'transformers>=5.23'",
        ) from error
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"TransformersModel({type(model).__name__})",
            found="no model of transformers",
            why="Its attention and its caches are found through the interfaces of transformers.",
            fix="Pass a model of transformers, such as AutoModelForCausalLM gives, or write "
            "`memory_specs` and `step` for this one.",
        )
    if model.config.is_encoder_decoder:
        raise _refused(
            model, "an encoder and a decoder", "The engine continues one text, with no source."
        )
    replaced = [name for name, one in model.named_modules() if "weight_product" in one.__dict__]
    if replaced:
        product = model.get_submodule(replaced[0]).__dict__["weight_product"]
        raise ConfigError(
            f"TransformersModel({type(model).__name__})",
            found=f"{len(replaced)} layers without the weights that they had, the first of them "
            f"{replaced[0]!r} with a {type(product).__name__}",
            why="Its forward pass is compared with the one that transformers computes, when the "
            "adapter is made, and for that it needs the weights as they were loaded.",
            fix="Make the TransformersModel first, and call pack_weights(model) or "
            "quantize_int8(model) of pcomm.inference.layers then.",
        )
    devices = {str(x.device) for x in model.parameters()}
    if len(devices) != 1 or "meta" in devices:
        raise _refused(
            model,
            f"weights on {', '.join(sorted(devices)) or 'no device'}",
            "The engine keeps blocks and states on one device.",
        )
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not module._can_set_attn_implementation():
            raise _refused(
                model,
                f"{type(module).__name__} has attention of its own",
                "Its attention is not looked up by a name, so nothing can take its place.",
            )


def _refused(model: nn.Module, found: str, why: str) -> ConfigError:
    return ConfigError(
        f"TransformersModel({type(model).__name__})",
        found=found,
        why=why,
        fix="Use transformers' generate for this model, or write `memory_specs` and `step` for it.",
    )
