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

# What `paged_attention` takes into account, and what layers hand to other implementations that has
# no effect on tokens without padding whose positions are given.
_SERVED = frozenset({"scaling", "softcap", "s_aux", "sliding_window"})
_WITHOUT_EFFECT = frozenset(
    (
        *("position_ids", "cache_position", "token_type_ids", "layer_idx"),
        *("use_cache", "past_key_values", "logits_to_keep", "num_items_in_batch", "return_dict"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
        *("dropout", "is_causal", "deterministic"),
    )
)


@dataclass(frozen=True)
class _Mask:
    """A mask that a model has made in the run in which calls are found.

    Attributes:
        tensor: What the model got for it, which is known again where a layer hands it over.
        sees: Which key a query sees, by their places; None for all before it within the size.
        size: Number of keys in its window; None for all.
    """

    tensor: Tensor
    sees: Callable[..., Any] | None
    size: int | None


class AttentionCalls:
    """The attention of one model, which transformers finds by a name.

    Args:
        name: The name, which no other model has.

    Attributes:
        specs: What each call keeps, in the order of the calls; empty until they are found.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.specs: list[KVSpec] = []
        # Made by the model while calls are found; None at all other times.
        self._masks: list[_Mask] | None = None
        self._batch: StepBatch | None = None
        self._memory: Sequence[LayerMemory | None] = ()
        self._next = 0

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Models find them by their name."""
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        AttentionInterface.register(self.name, self._attend)
        AttentionMaskInterface.register(self.name, self._mask)
        try:
            yield
        finally:
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
            raise self._other_number(f"{self._next}")

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
            raise self._other_number(f"more than {len(self.specs)}")
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
        self._masks.append(_Mask(tensor, mask_function, local_size))
        return tensor

    def _other_number(self, found: str) -> ConfigError:
        return ConfigError(
            "TransformersModel.step",
            found=f"{found} calls of attention, and {len(self.specs)} when the model was loaded",
            why="A call finds its keys and values by its place among the calls.",
            fix="Make the adapter anew where the model has been changed.",
        )

    def _found(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        asked: dict[str, Any],
    ) -> KVSpec:
        """What a call keeps.

        Raises:
            ConfigError: It asks for something that `paged_attention` does not do.
        """
        layer = f"{type(module).__name__}, call {len(self.specs)} of attention"
        assert self._masks is not None
        unknown = [
            k for k, v in asked.items() if v is not None and k not in _SERVED | _WITHOUT_EFFECT
        ]
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
            window = _window_of(known[0], layer)
        return KVSpec(
            heads=key.shape[1],
            head_dim=key.shape[3],
            dtype=key.dtype,
            value_dim=value.shape[3],
            window=window,
        )


def _window_of(mask: _Mask, layer: str) -> int | None:
    """Number of keys that a token sees by a mask of transformers; None for all before it."""
    size = mask.size
    if mask.sees is None:
        return size
    reach = 100_000 if size is None else size
    zero = torch.tensor(0)
    for query in (0, 1, 2, 7, 30, 200, reach - 1, reach, reach + 5, 2 * reach + 77):
        near = (-reach - 1, -reach, 1 - reach, -64, -17, -3, -1, 0, 1, 2, 9, 100)
        for key in {0, 1, query // 2, *(query + distance for distance in near)}:
            if key < 0:
                continue
            try:
                is_seen = bool(mask.sees(zero, zero, torch.tensor(query), torch.tensor(key)))
            except (IndexError, RuntimeError) as error:
                line = str(error).partition("\n")[0]
                raise _no_such_attention(
                    layer, f"has a mask for one text alone ({line})"
                ) from error
            if is_seen and key > query:
                raise _no_such_attention(layer, "sees tokens that come later")
            if is_seen != (key <= query and (size is None or key > query - size)):
                raise _no_such_attention(
                    layer, "has a mask that is neither causal nor a sliding window"
                )
    return size


def _no_such_attention(layer: str, found: str) -> ConfigError:
    return ConfigError(
        f"TransformersModel: {layer}",
        found=f"it {found}",
        why="paged_attention is causal, with a window, a cap of scores and sinks at most.",
        fix="Use transformers' generate for this model.",
    )
