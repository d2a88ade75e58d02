"""Layers that keep a state in transformers' cache: how they are found, and run on many requests.

Such a layer takes `[batch, tokens, width]` and a cache, and would mix requests that lie one after
the other in one row. So a step cuts its input: requests that decode are a batch of one token each,
and each chunk of a prompt is a row of its own.
"""

# Shape suffixes: T tokens of a step, N requests of one call, t tokens of one request.

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pcomm.core.errors import ConfigError
from pcomm.inference.model import LayerMemory, StateMemory, StateSpec, StepBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["RecurrentLayer", "find_recurrent_layers"]


@dataclass(frozen=True)
class _Part:
    """Tokens of a step that one call of the layer computes: N requests with t tokens each."""

    places_Nt: Tensor
    requests_N: Tensor
    has_states: bool


class RecurrentLayer:
    """A module that keeps a state of each request, run by parts within a step.

    Args:
        module: The module.
        argument: Name of the argument that is the cache.
        index: Number by which it asks the cache for its states.
        by_token: Which of its arguments have a row for each token, see `_by_token`.
        kept: Layer of a cache after a call of the mixer; its tensors show the shapes.

    Attributes:
        spec: Memory that it keeps of a request.
        continues: Whether several tokens may follow a state in one call: not every layer looks at
            its state then. The comparison at load finds it.
    """

    def __init__(
        self, module: nn.Module, argument: str, index: int, by_token: dict[str, Any], kept: Any
    ) -> None:
        self._module, self._argument, self._index = module, argument, index
        self._by_token = by_token
        self._signature = inspect.signature(module.forward)
        self._forward: Callable[..., Any] = module.forward
        self._kind, self._num_states = type(kept), kept.number_of_states
        states = dict(_tensors_of(kept))
        self.spec = StateSpec(
            shapes={name: tuple(state.shape[1:]) for name, state in states.items()},
            dtypes={name: state.dtype for name, state in states.items()},
        )
        self.continues = False
        self._batch: StepBatch | None = None
        self._memory: StateMemory | None = None

    @contextmanager
    def serving(self, batch: StepBatch, memory: LayerMemory | None) -> Iterator[None]:
        """The module computes the requests of a batch."""
        assert isinstance(memory, StateMemory)
        # A forward of the module itself, such as libraries put there, stays what is called.
        attributes, self._forward = vars(self._module), self._module.forward
        former = attributes.get("forward")
        self._batch, self._memory = batch, memory
        attributes["forward"] = self._run
        try:
            yield
        finally:
            self._batch = self._memory = None
            if former is None:
                del attributes["forward"]
            else:
                attributes["forward"] = former

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        assert self._batch is not None
        given = self._signature.bind(*args, **kwargs)
        num_tokens = len(self._batch.tokens_T)
        whole = dict(given.arguments)
        found: list[tuple[_Part, Any]] = []
        for part in self._parts(self._batch):
            cache = self._cache(part)
            for name, value in whole.items():
                given.arguments[name] = _cut(value, self._by_token.get(name), part.places_Nt)
            given.arguments[self._argument] = cache
            found.append((part, self._forward(*given.args, **given.kwargs)))
            self._keep(part, cache.layers[self._index])
        return _joined(found, num_tokens)

    def _parts(self, batch: StepBatch) -> Iterator[_Part]:
        """All decodes as one part, and each chunk as one, or token by token behind a state."""
        key = (RecurrentLayer, self.continues)
        parts: list[_Part] | None = batch.prepared.get(key)
        if parts is None:
            parts = batch.prepared[key] = list(self._cut_up(batch))
        yield from parts

    def _cut_up(self, batch: StepBatch) -> Iterator[_Part]:
        device = batch.tokens_T.device
        decodes: list[tuple[int, int]] = []
        for number, (start, stop) in enumerate(pairwise(batch.cu_seqlens)):
            has_states = batch.context_lens[number] > 0
            if has_states and stop - start == 1:
                decodes.append((start, number))
                continue
            step = stop - start if self.continues or not has_states else 1
            for first in range(start, stop, step):
                places = torch.arange(first, first + step, device=device)
                yield _Part(places[None], torch.tensor([number], device=device), has_states)
        if decodes:
            places, numbers = torch.tensor(decodes, device=device).unbind(1)
            yield _Part(places[:, None], numbers, True)

    def _cache(self, part: _Part) -> Any:
        """A cache of transformers with the states of a part."""
        from transformers import Cache

        assert self._batch is not None
        assert self._memory is not None
        layer = self._kind(number_of_states=self._num_states)
        if part.has_states:
            slots_N = self._batch.state_slots_N[part.requests_N]
            for name, pool in self._memory.pools.items():
                kind, number = name.split("_")
                state = pool.index_select(0, slots_N)
                getattr(layer, f"{kind}_states")[int(number)] = state
                getattr(layer, f"is_{kind}_states_initialized")[int(number)] = True
                layer.has_previous_state[int(number)] = True
                layer.device, layer.dtype = state.device, state.dtype
                if kind == "conv":
                    layer.conv_kernel_size[int(number)] = state.shape[-1]
        cache = Cache(layers=[])
        cache.layers = _OneLayer(self._index, layer)  # type: ignore[assignment]
        return cache

    def _keep(self, part: _Part, layer: Any) -> None:
        assert self._batch is not None
        assert self._memory is not None
        slots_N = self._batch.state_slots_N[part.requests_N]
        for name, state in _tensors_of(layer):
            pool = self._memory.pools[name]
            pool.index_copy_(0, slots_N, state.to(pool.dtype))


class _OneLayer:
    """The layers of a cache that one layer asks."""

    def __init__(self, index: int, layer: Any) -> None:
        self.index, self.layer = index, layer

    def __len__(self) -> int:
        return self.index + 1

    def __getitem__(self, index: int) -> Any:
        if not -1 <= index <= self.index:
            raise IndexError(index)
        return self.layer


def _tensors_of(layer: Any) -> Iterator[tuple[str, Tensor]]:
    """The states of a layer of a cache, by the names of the `StateSpec`."""
    for kind in ("conv", "recurrent"):
        for number, state in getattr(layer, f"{kind}_states").items():
            if state is not None:
                yield f"{kind}_{number}", state


def _by_token(value: Any, num_tokens: int) -> Any:
    """Whether a tensor has a row for each token, `[1, T, ...]`; of a container each entry."""
    if isinstance(value, Tensor):
        return value.dim() >= 2 and value.shape[:2] == (1, num_tokens)
    if isinstance(value, dict):
        return {k: _by_token(v, num_tokens) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return dict(enumerate(_by_token(v, num_tokens) for v in value))
    return None


def _cut(value: Any, by_token: Any, places_Nt: Tensor) -> Any:
    """What of an argument belongs to some tokens."""
    if isinstance(value, Tensor):
        return value[0][places_Nt] if by_token else value
    entries = by_token or {}
    if isinstance(value, dict):
        return {k: _cut(v, entries.get(k), places_Nt) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(v, entries.get(k), places_Nt) for k, v in enumerate(value))
    return value


def _joined(found: list[tuple[_Part, Any]], num_tokens: int) -> Any:
    """The outputs of all parts in the order of the tokens."""
    first = found[0][1]
    if isinstance(first, (tuple, list)):
        parts = [part for part, _ in found]
        columns = zip(*(output for _, output in found), strict=True)
        return type(first)(
            _joined(list(zip(parts, column, strict=True)), num_tokens) for column in columns
        )
    if not isinstance(first, Tensor):
        return first
    joined = first.new_empty(1, num_tokens, *first.shape[2:])
    for part, output in found:
        joined[0].index_copy_(0, part.places_Nt.flatten(), output.flatten(0, 1))
    return joined


def find_recurrent_layers(model: PreTrainedModel, tokens_T: Tensor) -> list[RecurrentLayer]:
    """The modules that keep states in the model's cache, in the order of its forward pass.

    Args:
        model: The model, which computes some tokens with a cache.
        tokens_T: The tokens.

    Raises:
        ConfigError: A module keeps states of several layers, or has no argument for the cache.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    layers = DynamicCache(config=model.config).layers
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        return []
    running: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
    found: dict[int, tuple[nn.Module, str, dict[str, Any]]] = {}

    def note(index: int) -> None:
        module, args, kwargs = running[-1]
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        names = [name for name, value in given.items() if value is cache]
        if not names:
            raise _not_by_parts(model, module, "the cache is no argument of its forward")
        if any((other is module) != (known == index) for known, (other, _, _) in found.items()):
            raise _not_by_parts(model, module, "it shares states with a module, or has several")
        found[index] = (module, names[0], _by_token(given, tokens_T.shape[0]))

    class Noting(DynamicCache):
        def update_conv_state(
            self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
        ) -> Tensor:
            note(layer_idx)
            return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

        def update_recurrent_state(
            self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
        ) -> Tensor:
            note(layer_idx)
            return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append((module, args, kwargs))

    def leave(*_: Any) -> None:
        running.pop()

    cache = Noting(config=model.config)
    names = inspect.signature(model.forward).parameters
    name = "past_key_values" if "past_key_values" in names else "cache_params"
    with ExitStack() as hooks:
        for module in model.modules():
            entered = module.register_forward_pre_hook(enter, with_kwargs=True)
            left = module.register_forward_hook(leave, always_call=True)
            hooks.callback(entered.remove)
            hooks.callback(left.remove)
        with torch.no_grad():
            model(input_ids=tokens_T[None], use_cache=True, **{name: cache})
    return [
        RecurrentLayer(module, argument, index, by_token, cache.layers[index])
        for index, (module, argument, by_token) in found.items()
    ]


def _not_by_parts(model: nn.Module, module: nn.Module, found: str) -> ConfigError:
    return ConfigError(
        f"TransformersModel({type(model).__name__}): states of {type(module).__name__}",
        found=found,
        why="A step runs such a module by parts, with a cache for each.",
        fix="Use transformers' generate for this model.",
    )
