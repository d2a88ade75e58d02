"""A causal language model of transformers, unchanged, as a model of the engine.

transformers looks attention up by a name, and hands a cache object to each layer that keeps a
state. So nothing in the model is copied or rewritten: within a step its attention is
`paged_attention`, and each recurrent layer runs once for every request, or once for all that decode,
with a cache that stands for the slots of the engine. Between steps the model is as it was.

What each layer keeps is found by a run of a few tokens. Another one compares the logits of the
engine's way, in chunks and with two requests, with those of the model's own forward: where they
differ the model is refused, since it would write wrong text without an error.
"""

# Shape suffixes: T tokens of a step, L rows of logits, V token ids.

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.inference.model import LayerMemory, LayerSpec, StepBatch
from pcomm.inference.transformers.attention_calls import AttentionCalls
from pcomm.inference.transformers.recurrent_layers import RecurrentLayer, find_recurrent_layers
from pcomm.inference.transformers.self_check import check_logits

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["TransformersModel"]

_NUMBERS = count()


class TransformersModel:
    """A causal language model of transformers, unchanged, as a model of the engine.

    Its weights are not copied, and may change between steps. Steps compute no gradients. Local;
    under tensor parallelism every rank has its own.

    Args:
        model: A causal language model on one device, whose attention goes through transformers'
            `AttentionInterface`. It is put in evaluation mode.
        check: False to skip the comparison with the model's own forward.

    Raises:
        UnsupportedError: transformers is not installed.
        ConfigError: This is no causal language model of transformers, a layer keeps or asks for
            what the engine does not have, or the logits of the engine's way are not those of the
            model's own forward. The model is as it was then.

    Source:
        `AttentionInterface`, `AttentionMaskInterface` and `Cache` of transformers 5.23.
    """

    def __init__(self, model: PreTrainedModel, *, check: bool = True) -> None:
        _check_kind(model)
        self.model = model
        self._parameters = inspect.signature(model.forward).parameters
        self._was_training = model.training
        self._calls = AttentionCalls(f"pcomm_{next(_NUMBERS)}")
        self.recurrent: list[RecurrentLayer] = []
        self._is_closed = False
        model.eval()
        try:
            self._configs = self._configs_with_attention()
            tokens_T = torch.arange(1, 1 + _NUM_TOKENS, device=model.device)
            tokens_T %= model.get_input_embeddings().num_embeddings
            with self._plugged_in(), self._calls.being_found():
                self._forward(tokens_T, torch.arange(_NUM_TOKENS, device=model.device))
            self.recurrent = find_recurrent_layers(model, tokens_T)
            if not self.memory_specs():
                raise _refused(
                    model,
                    "no call of attention by name, and no layer that keeps a state in its cache",
                    "What it keeps of a text cannot be found.",
                )
            if check:
                check_logits(self)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Take the names back that transformers looks up. It can be closed again."""
        if not self._is_closed:
            self._is_closed = True
            self._calls.unregister()
            self.model.train(self._was_training)

    def memory_specs(self) -> Sequence[LayerSpec]:
        """What each call of attention keeps, in their order, and then each recurrent layer."""
        return [*self._calls.specs, *(layer.spec for layer in self.recurrent)]

    def step(self, batch: StepBatch, memory: Sequence[LayerMemory | None]) -> Tensor:
        """Logits `[L, V]`, see `Model.step`.

        Raises:
            ConfigError: The adapter is closed, or the model does not call its attention as it did
                when it was loaded.
        """
        if self._is_closed:
            raise ConfigError("TransformersModel.step: it is closed")
        number = len(self._calls.specs)
        with self._plugged_in(), self._calls.serving(batch, memory[:number]):
            for layer, kept in zip(self.recurrent, memory[number:], strict=True):
                layer.serve(batch, kept)
            try:
                return self._forward(batch.tokens_T, batch.positions_T, batch.logits_rows)
            finally:
                for layer in self.recurrent:
                    layer.restore()

    def logits_alone(self, tokens_T: Tensor) -> Tensor:
        """Logits `[T, V]` of one text by the model's own forward. Local."""
        return self._forward(tokens_T, torch.arange(len(tokens_T), device=tokens_T.device))

    def _forward(
        self, tokens_T: Tensor, positions_T: Tensor, rows_L: Tensor | None = None
    ) -> Tensor:
        given: dict[str, Any] = {"input_ids": tokens_T[None], "use_cache": False}
        if "position_ids" in self._parameters:
            given["position_ids"] = positions_T[None]
        keeps = rows_L is not None and "logits_to_keep" in self._parameters
        if keeps:
            given["logits_to_keep"] = rows_L
        with torch.no_grad():
            logits: Tensor = self.model(**given).logits[0]
        return logits if keeps or rows_L is None else logits[rows_L]

    @contextmanager
    def _plugged_in(self) -> Iterator[None]:
        """The attention of the model is ours."""
        for config, _ in self._configs:
            config._attn_implementation = self._calls.name
        try:
            yield
        finally:
            for config, former in reversed(self._configs):
                config._attn_implementation = former

    def _configs_with_attention(self) -> list[tuple[PreTrainedConfig, Any]]:
        """The configurations in which a module finds the name of its attention, and that name."""
        from transformers import PreTrainedConfig, PreTrainedModel

        found: dict[int, tuple[PreTrainedConfig, Any]] = {}
        for module in self.model.modules():
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig):
                found.setdefault(id(config), (config, config._attn_implementation))
            if isinstance(module, PreTrainedModel) and not module._can_set_attn_implementation():
                raise _refused(
                    self.model,
                    f"{type(module).__name__} has attention of its own",
                    "Its attention is not looked up by a name, so nothing can take its place.",
                )
        return list(found.values())


_NUM_TOKENS = 8


def _check_kind(model: nn.Module) -> None:
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise UnsupportedError(
            "TransformersModel",
            found=f"no transformers ({error})",
            why="It runs models of transformers.",
            fix="python3 -m pip install 'transformers>=5.23'",
        ) from error
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "get_output_embeddings"):
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


def _refused(model: nn.Module, found: str, why: str) -> ConfigError:
    return ConfigError(
        f"TransformersModel({type(model).__name__})",
        found=found,
        why=why,
        fix="Use transformers' generate for this model, or write `memory_specs` and `step` for it.",
    )
