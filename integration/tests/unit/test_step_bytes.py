"""The bytes that `stats()` says a step moves, against what torch's operations were seen to read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pcomm.core.testing import run_virtual
from pcomm.core.testing.virtual import VirtualCollectives
from pcomm.inference import Engine, KVMemory, Request, SamplingParams
from pcomm.inference.roofline import BandwidthMeter, DecodeStats, MemoryBandwidth
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, ModelConfig
from pcomm.integration.models.language_model import LanguageModel

VOCABULARY = 96
SHAPES: dict[str, dict[str, Any]] = {
    "attention": {"pattern": "A", "qk_norm": True, "qkv_bias": True, "attention_gate": True},
    "tied": {"pattern": "A", "tie_embeddings": True},
    "experts": {
        "pattern": "A",
        "experts": 12,
        "experts_per_token": 3,
        "shared_expert_width": 16,
        "shared_expert_gate": True,
    },
    "Mamba": {"pattern": "M", "mlp_width": "none"},
    "hybrid": {"pattern": "GGGA", "tie_embeddings": True},
    "hybrid in bf16": {"pattern": "GAM"},
}


class Reads(TorchDispatchMode):
    """Counts bytes of some tensors that operations take as arguments; a view is no read.

    Args:
        tensors: Tensors that are watched, by name.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors}
        self._regions: dict[str, set[tuple[int, int]]] = defaultdict(set)
        self.rows: dict[str, int] = defaultdict(int)
        self.written: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        op = func.overloadpacket.__name__
        results = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        views = {one.untyped_storage()._cdata for one in results}
        for place, tensor in enumerate(tree_leaves((args, kwargs))):
            if not isinstance(tensor, Tensor) or not tensor.numel():
                continue
            storage = tensor.untyped_storage()._cdata
            name = self._names.get(storage)
            if name is None:
                continue
            if op == "index_copy_" and place == 0:
                self.written[name] += args[3].nbytes
            elif op in ("embedding", "index_select") and place == 0:
                self.rows[name] += result.nbytes
            elif storage not in views:
                size = tensor.element_size()
                begin = tensor.storage_offset() * size
                # Of a transposed weight, too: its elements lie side by side.
                assert tensor.numel() * size == _extent(tensor)
                self._regions[name].add((begin, begin + _extent(tensor)))
        return result

    def read(self, name: str) -> int:
        """Bytes of one tensor that were read at least once, apart from rows that were looked up."""
        total = last = 0
        for begin, end in sorted(self._regions[name]):
            total += max(end - max(begin, last), 0)
            last = max(last, end)
        return total


def _extent(tensor: Tensor) -> int:
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((n - 1) * stride for n, stride in strides)) * tensor.element_size()


def model_of(kind: str, collectives: VirtualCollectives | None = None) -> LanguageModel:
    shape = {"layers": len(SHAPES[kind]["pattern"]), **SHAPES[kind]}
    config = ModelConfig(
        width=48, heads=4, head_dim=16, mamba_groups=2, mamba_state_dim=24,
        **{"kv_heads": 2, "mlp_width": 64, **shape},
    )  # fmt: skip
    torch.manual_seed(1)
    dtype = torch.bfloat16 if "bf16" in kind else torch.float32
    resolved = validate(Config(model=config), 1).model
    return LanguageModel(resolved, VOCABULARY, collectives, dtype=dtype).eval()


def decoding(model: LanguageModel, prompts: Sequence[int]) -> Engine:
    """An engine whose requests have had their first token."""
    meter = BandwidthMeter(lambda num_bytes, device: MemoryBandwidth(1.0, 1.0, 1.0))
    meter.bandwidth(torch.device("cpu"), 0)
    engine = Engine(
        model,
        vocabulary=VOCABULARY,
        meter=meter,
        max_model_len=64,
        num_blocks=20,
        num_state_slots=6,
        prefix_cache=False,
    )
    for number, length in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
        prompt = tuple((7 * number + 3 * place) % VOCABULARY for place in range(length))
        engine.add(Request(str(number), prompt, params))
    engine.step()
    return engine


def observed(model: LanguageModel, prompts: Sequence[int]) -> tuple[DecodeStats, Reads, Reads]:
    """What the engine says of one step of decoding, and what of weights and memory was used."""
    engine = decoding(model, prompts)
    weights = Reads([*model.named_parameters(), *model.named_buffers()])
    pools = []
    for layer, memory in enumerate(engine._allocator.pools.memories):
        if isinstance(memory, KVMemory):
            pools += [(f"kv {layer} k", memory.keys), (f"kv {layer} v", memory.values)]
        else:
            pools += [(f"state {layer} {name}", pool) for name, pool in memory.pools.items()]
    kept = Reads(pools)
    with weights, kept:
        engine.step()
    found = engine.stats().decode
    engine.close()
    assert found is not None
    return found, weights, kept


def weight_bytes(model: LanguageModel, reads: Reads) -> int:
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    # Rows of a table that is read whole are a part of it.
    return sum(reads.read(name) or reads.rows[name] for name in names)


@pytest.mark.parametrize("kind", SHAPES)
def test_a_step_of_one_request_reads_what_it_says(kind):
    model = model_of(kind)
    found, weights, _ = observed(model, [5])
    assert not found.is_upper_bound
    assert found.moved.weights == weight_bytes(model, weights)
    every = sum(one.nbytes for one in model.parameters())
    if kind in ("tied", "hybrid"):
        assert found.moved.weights == every
    else:
        # All but one row of the table; of experts a quarter.
        assert found.moved.weights <= every - (VOCABULARY - 1) * 48 * (2 if "bf16" in kind else 4)


@pytest.mark.parametrize("kind", SHAPES)
def test_a_step_of_three_requests_reads_weights_once_and_each_ones_memory(kind):
    model, prompts = model_of(kind), [5, 17, 2]
    found, weights, kept = observed(model, prompts)
    seen = weight_bytes(model, weights)
    if kind == "experts":
        assert found.is_upper_bound
        assert found.moved.weights >= seen > observed(model, [5])[0].moved.weights
        # Only what experts have is no exact number.
        expert = sum(one[0].nbytes for one in model.blocks[0].mlp.experts.parameters())
        assert (found.moved.weights - seen) % expert == 0
    else:
        assert not found.is_upper_bound
        assert found.moved.weights == seen
    states = [name for name in kept.rows | kept.written if name.startswith("state")]
    assert found.moved.states == sum(kept.rows[name] + kept.written[name] for name in states)
    # Each request has written one token, and has as many and those of its prompt to read.
    new = sum(size for name, size in kept.written.items() if name.startswith("kv"))
    assert found.moved.keys_values == (sum(prompts) + 3) * new // 3
    assert found.moved.logits == 3 * VOCABULARY * (2 if "bf16" in kind else 4)


def test_a_rank_counts_its_own_share():
    def work(collectives: VirtualCollectives) -> tuple[int, int]:
        model = model_of("experts", collectives)
        weights = model.step_weights()
        assert not weights.is_exact(1)
        return weights.every_step, weights.largest - weights.every_step

    (first, experts), second = run_virtual(work, 2)
    assert (first, experts) == second
    whole = model_of("experts").step_weights()
    # Projections and the head are shared, norms and the router are not; each has all experts.
    assert whole.every_step / 2 < first < whole.every_step
    assert experts == whole.largest - whole.every_step
