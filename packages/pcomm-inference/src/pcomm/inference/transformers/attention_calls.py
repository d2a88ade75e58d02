"""The calls of attention in a forward pass: what each keeps, and how a step serves them.

A call is known by its place in the forward pass and not by its module: some models use the layers
twice, or call attention twice in a layer.
"""

# Shape suffixes: T tokens of a step, H query heads, G key heads, K width of a key, V of a value.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pcomm.core.errors import ConfigError
from pcomm.inference.attention.paged_attention import paged_attention
from pcomm.inference.model import KVMemory, KVSpec, LayerMemory, StepBatch

__all__ = ["AttentionCalls"]

# What layers hand to their attention for other implementations; it has no effect on a batch without
# padding, whose positions are given.
_WITHOUT_EFFECT = frozenset(
    [
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "output_router_logits",
        "past_key_values",
        "token_type_ids",
        "logits_to_keep",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "num_items_in_batch",
        "layer_idx",
        "dropout",
        "is_causal",
        "scaling",
        "softcap",
        "s_aux",
        "sliding_window",
        "deterministic",
        "layer_head_mask",
        "head_mask",
        "cache",
    ]
)


@dataclass(frozen=True)
class _Mask:
    """What one mask of a forward pass shows a token: a window, or all before it."""

    tensor: Tensor
    window: int | None


class AttentionCalls:
    """The attention of one model, registered with transformers under a name of its own.

    Args:
        name: The name.

    Attributes:
        specs: What each call keeps, in the order of the calls; empty until they are found.
    """

    def __init__(self, name: str) -> None:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        self.name = name
        self.specs: list[KVSpec] = []
        self._masks: list[_Mask] | None = None
        self._batch: StepBatch | None = None
        self._memory: Sequence[LayerMemory | None] = ()
        self._next = 0
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, self._mask)

    def unregister(self) -> None:
        """Take the name back."""
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(self.name, None)

    @contextmanager
    def being_found(self) -> Iterator[None]:
        """Calls note what they keep, and compute nothing."""
        self._masks = []
        try:
            yield
        finally:
            self._masks = None

    @contextmanager
    def serving(self, batch: StepBatch, memory: Sequence[LayerMemory | None]) -> Iterator[None]:
        """Calls attend to the blocks of a batch.

        Raises:
            ConfigError: There were fewer or more of them than when they were found.
        """
        self._batch, self._memory, self._next = batch, memory, 0
        try:
            yield
        finally:
            self._batch, self._memory = None, ()
        if self._next != len(self.specs):
            raise ConfigError(
                f"{self._next} calls of attention in a step, {len(self.specs)} at load"
            )

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **asked: Any,
    ) -> tuple[Tensor, None]:
        """`[1, T, H, V]`: what transformers expects of a function of attention."""
        if self._masks is not None:
            self.specs.append(self._found(module, query, key, value, attention_mask, asked))
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
        if self._next >= len(self.specs) or self._batch is None:
            raise ConfigError(f"more than the {len(self.specs)} calls of attention found at load")
        number, self._next = self._next, self._next + 1
        memory = self._memory[number]
        assert isinstance(memory, KVMemory)
        q_THK, k_TGK, v_TGV = (x[0].transpose(0, 1) for x in (query, key, value))
        mixed = paged_attention(
            q_THK,
            k_TGK,
            v_TGV,
            memory,
            self._batch,
            scale=asked.get("scaling"),
            window=self.specs[number].window,
            softcap=asked.get("softcap"),
            sinks_H=asked.get("s_aux"),
        )
        return mixed[None], None

    def _mask(
        self,
        *unused: Any,
        mask_function: Callable[..., Any] | None = None,
        local_size: int | None = None,
        **others: Any,
    ) -> Tensor | None:
        """None in a step. A tensor that is known again while calls are found."""
        if self._masks is None:
            return None
        length = others["q_length"]
        tensor = torch.ones(1, 1, length, length, dtype=torch.bool, device=others.get("device"))
        self._masks.append(_Mask(tensor, _window_of(mask_function, local_size)))
        return tensor

    def _found(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        asked: dict[str, Any],
    ) -> KVSpec:
        layer = f"{type(module).__name__}, call {len(self.specs)} of attention"
        assert self._masks is not None
        unknown = [k for k, v in asked.items() if v is not None and k not in _WITHOUT_EFFECT]
        if unknown:
            raise _no_such_attention(layer, f"asks for {', '.join(sorted(unknown))}")
        if asked.get("is_causal") is False or (
            mask is None and not getattr(module, "is_causal", True)
        ):
            raise _no_such_attention(layer, "sees tokens that come later")
        if key.shape[2] != query.shape[2] or query.shape[0] != 1:
            shapes = f"{tuple(query.shape)} and {tuple(key.shape)}"
            raise _no_such_attention(layer, f"has queries and keys of shapes {shapes}")
        window = asked.get("sliding_window")
        if mask is not None:
            known = [m for m in self._masks if m.tensor is mask]
            if not known:
                raise _no_such_attention(layer, "has a mask of its own")
            window = known[0].window
        return KVSpec(
            heads=key.shape[1],
            head_dim=key.shape[3],
            dtype=key.dtype,
            value_dim=value.shape[3],
            window=window,
        )


def _window_of(sees: Callable[..., Any] | None, size: int | None) -> int | None:
    """Number of keys that a token sees by a mask function of transformers; None for all."""

    def is_seen(query: int, key: int) -> bool:
        assert sees is not None
        try:
            zero = torch.tensor(0)
            return bool(sees(zero, zero, torch.tensor(query), torch.tensor(key)))
        except (IndexError, RuntimeError) as error:
            raise _no_such_attention("a mask", f"is made for one text ({error})") from error

    if sees is None:
        return size
    if is_seen(2, 3):
        raise _no_such_attention("a mask", "shows tokens that come later")
    far = 5 + (size or 100_000)
    if size is None:
        if is_seen(far, 0):
            return None
    elif is_seen(far, 6) and not is_seen(far, 5):
        return size
    raise _no_such_attention("a mask", "is neither causal nor a sliding window")


def _no_such_attention(layer: str, found: str) -> ConfigError:
    return ConfigError(
        f"TransformersModel: {layer}",
        found=f"it {found}",
        why="paged_attention is causal, with a window, a cap of scores and sinks, and nothing else.",
        fix="Use transformers' generate for this model.",
    )
