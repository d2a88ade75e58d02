"""Attention of transformers, over the ranks of a plan.

Attention is looked up by a name. Within a batch that name is ours: heads or tokens are exchanged,
and then the implementation that the model had runs on each sequence, with the mask that it makes
of the model's own mask function. So windows, caps of scores and sinks are what they were.
"""

# t tokens of this rank between layers, T tokens of the pack, H query heads, K width of a key,
# V of a value, n tokens of a sequence

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pcomm.core.errors import UnsupportedError
from pcomm.gdn_cp.ops.entry import graph_break
from pcomm.gdn_cp.plan import Plan
from pcomm.gdn_cp.specs import AttentionSpec, Section, Spec, check_counts
from pcomm.gdn_cp.strategies.head_share import HeadShare

__all__ = ["AttentionSockets"]


# What says where the tokens of this rank are, for implementations that pack them themselves.
_PLACES = {
    "position_ids",
    "cache_position",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "attention_mask",
    "token_type_ids",
    "past_key_values",
    "labels",
}


@dataclass(frozen=True)
class KeyValueSpec(AttentionSpec):
    """Softmax attention whose values may be of another width than its keys.

    Args:
        value_dim: Width of a head of values and the output.
    """

    value_dim: int = 1

    def __post_init__(self) -> None:
        check_counts(self, self.num_heads, self.num_kv_heads)

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """Queries, keys, values."""
        q, k, _ = super().sections
        return q, k, Section("v", self.num_kv_heads, self.value_dim)

    @cached_property
    def output(self) -> Section:
        """What attention returns."""
        return Section("output", self.num_heads, self.value_dim)


@dataclass(frozen=True, eq=False)
class _Mask:
    """One mask of a forward pass: how the model asked for it, and a tensor that stands for it."""

    asked: dict[str, Any]
    shown: Tensor


@dataclass(frozen=True, eq=False)
class _Site:
    """A module that calls attention: the implementation it had, and that implementation's mask."""

    attend: Callable[..., Any]
    make_mask: Callable[..., Any] | None
    mask: _Mask | None


class AttentionSockets:
    """The attention of one model, under a name of its own.

    Args:
        model: The model.
        name: The name.

    Attributes:
        specs: What the calls move, without repetition; empty until they are found.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model, self.name = model, name
        self.specs: list[Spec] = []
        self._sites: dict[int, _Site] = {}
        self._masks: list[_Mask] = []
        self._is_finding = False
        self._plan_of: Callable[[Spec], Plan] | None = None
        self._made: dict[Any, Any] = {}
        self._formers = self._configs()

    def _configs(self) -> dict[int, tuple[Any, Any]]:
        """The configurations where a module finds the name of its attention, and that name."""
        from transformers import PreTrainedConfig

        found: dict[int, tuple[Any, Any]] = {}
        for module in self.model.modules():
            config = getattr(module, "config", None)
            if isinstance(config, PreTrainedConfig):
                found.setdefault(id(config), (config, config._attn_implementation))
        return found

    def plug(self, plan_of: Callable[[Spec], Plan], *, is_finding: bool = False) -> None:
        """Have attention run by the plan that has its specification.

        Args:
            plan_of: The plan of a specification.
            is_finding: True for calls to note what they move.
        """
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        self._plan_of, self._is_finding = plan_of, is_finding
        AttentionInterface.register(self.name, self._attend)
        AttentionMaskInterface.register(self.name, self._mask)
        self._formers = self._configs()
        for config, _ in self._formers.values():
            config._attn_implementation = self.name

    def unplug(self) -> None:
        """Have the model find the attention that it had."""
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        for config, former in reversed(self._formers.values()):
            config._attn_implementation = former
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(self.name, None)
        self._plan_of, self._is_finding = None, False
        self._masks.clear()
        self._made.clear()

    @graph_break
    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **asked: Any,
    ) -> tuple[Tensor, None]:
        """`[1, t, H, V]`: what transformers expects of a function of attention."""
        spec = KeyValueSpec(query.shape[1], key.shape[1], query.shape[3], value.shape[3])
        if self._is_finding:
            self._find(module, spec, query, key, attention_mask, asked)
        site = self._sites[id(module)]
        assert self._plan_of is not None, "attention has this name within a batch only"
        plan = self._plan_of(spec)
        sections = [x[0].transpose(0, 1).flatten(1) for x in (query, key, value)]
        q, k, v = (
            x.unflatten(-1, (-1, section.head_width)).transpose(0, 1)[None]
            for x, section in zip(plan.to_heads(spec, sections), spec.sections, strict=True)
        )
        share = plan.head_share(spec)
        shown = _SharedModule(module, spec, share)
        passed = {
            name: _of_heads(x, spec, share) for name, x in asked.items() if name not in _PLACES
        }
        outputs = [v.new_zeros(0, share.output.num_heads, spec.value_dim)]
        for first, last in pairwise(plan.cu_seqlens_of(spec)):
            if last == first:
                continue
            mask = self._mask_of(site, last - first, query)
            parts = (x[:, :, first:last] for x in (q, k, v))
            outputs.append(site.attend(shown, *parts, mask, **passed)[0][0])
        y = plan.from_heads(spec, torch.cat(outputs).flatten(1))
        return y.unflatten(-1, (spec.num_heads, -1))[None], None

    def _mask(self, *unused: Any, **asked: Any) -> Tensor | None:
        """None within a batch. A tensor that is known again while calls are found."""
        if not self._is_finding:
            return None
        one = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=asked.get("device"))
        shown = one.expand(1, 1, asked["q_length"], asked["kv_length"])
        self._masks.append(_Mask(asked, shown))
        return shown

    def _mask_of(self, site: _Site, length: int, query: Tensor) -> Any:
        """The mask of one sequence, as the implementation that the model had wants it."""
        if site.mask is None or site.make_mask is None:
            return None
        key = (id(site.mask), length, query.dtype, query.device)
        if key not in self._made:
            asked = site.mask.asked | {
                "batch_size": 1,
                "q_length": length,
                "kv_length": length,
                "q_offset": 0,
                "kv_offset": 0,
                "attention_mask": None,
                "dtype": query.dtype,
                "device": query.device,
            }
            self._made[key] = site.make_mask(**asked)
        return self._made[key]

    def _find(
        self,
        module: nn.Module,
        spec: Spec,
        query: Tensor,
        key: Tensor,
        shown: Tensor | None,
        asked: dict[str, Any],
    ) -> None:
        """Note one call, unless its attention depends on what only its own rank has."""
        tensors = [
            name
            for name, x in asked.items()
            if isinstance(x, Tensor) and name not in (*_PLACES, "s_aux") and x.dim()
        ]
        if tensors:
            raise self._refused(module, f"attention with {', '.join(tensors)} for its tokens")
        if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
            shapes = f"{tuple(query.shape)} and {tuple(key.shape)}"
            raise self._refused(module, f"queries and keys of shapes {shapes}")
        mask = None
        if shown is not None:
            known = [m for m in self._masks if m.shown.data_ptr() == shown.data_ptr()]
            if not known or known[0].shown.shape != shown.shape:
                raise self._refused(module, "attention with a mask of its own")
            mask = known[0]
        site = _Site(*self._implementation(module), mask)
        if self._sites.setdefault(id(module), site).mask is not mask:
            raise self._refused(module, "calls of attention with several masks")
        try:
            self._mask_of(site, 2 * query.shape[2], query)
        except (IndexError, RuntimeError) as error:
            raise self._refused(module, f"a mask that is made for one text ({error})") from error
        if spec not in self.specs:
            self.specs.append(spec)

    def _implementation(self, module: nn.Module) -> tuple[Any, Any]:
        """The function of attention that the module had, and that which makes its masks."""
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        config = getattr(module, "config", None)
        _, former = self._formers.get(id(config), next(iter(self._formers.values())))
        attend = AttentionInterface._global_mapping.get(former)
        if attend is None:
            own = inspect.unwrap(type(module).forward).__globals__
            attend = own.get("eager_attention_forward")
        if attend is None:
            raise self._refused(module, f"no implementation {former!r} of attention")
        return attend, AttentionMaskInterface._global_mapping.get(former)

    def _refused(self, module: nn.Module, found: str) -> UnsupportedError:
        name = next(name for name, other in self.model.named_modules() if other is module)
        return UnsupportedError(
            f"context_parallel: {name} ({type(module).__name__})",
            found=found,
            why="Each sequence is attended to as a whole, by the mask function of the model.",
            fix="Call the operations of a plan in a forward of your own for this layer.",
        )


class _SharedModule:
    """A module of attention as its implementation sees it, with the heads of one rank."""

    def __init__(self, module: nn.Module, spec: KeyValueSpec, share: HeadShare) -> None:
        self._module = module
        keys = share.sections[1].num_heads
        if getattr(module, "num_key_value_groups", None) == spec.num_heads // spec.num_kv_heads:
            self.num_key_value_groups = share.output.num_heads // keys
        for name, parameter in module.named_parameters(recurse=False):
            setattr(self, name, _of_heads(parameter, spec, share))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _of_heads(x: Any, spec: KeyValueSpec, share: HeadShare) -> Any:
    """This rank's part of a tensor with a number for each head; anything else as it is."""
    if not isinstance(x, Tensor) or x.numel() != spec.num_heads or spec.num_heads == 1:
        return x
    return share.take(x, "q", dim=next(d for d, n in enumerate(x.shape) if n == spec.num_heads))
