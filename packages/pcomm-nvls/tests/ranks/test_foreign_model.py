"""Models of transformers under their own tensor-parallel plans, over kernels of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from core_support.works_with import check_outcome, models, outcome
from nvls_support.emulation import emulate
from pcomm.core.testing import ranks

# Dense layers, and experts.
FEW = ("llama", "mixtral")
MORE = (
    *("cohere", "gemma2", "glm4", "gpt_oss", "granite", "mistral", "olmo2", "phi3", "qwen2"),
    *("qwen3", "qwen3_moe", "starcoder2"),
)


@contextmanager
def world_of(group: dist.ProcessGroup) -> Iterator[None]:
    """A group as the default one, as `init_process_group` of its backend would make it."""
    default = distributed_c10d._get_default_group()
    distributed_c10d._update_default_pg(group)
    # DTensor keeps meshes by their ranks and names, and the group of the first one.
    _clear_sharding_prop_cache()
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(default)
        _clear_sharding_prop_cache()


def check_model(kind: str) -> None:
    """Logits of a family under its own plan: alone, over gloo and over kernels."""
    emulate()
    # Here, so that the ranks alone import transformers.
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.distributed import DistributedConfig

    from core_support.tiny_transformers import tiny_config, tiny_model
    from pcomm.nvls import register_backend

    register_backend(max_bytes=1 << 16)
    # A head that is not tied: transformers 5.23 divides a tied one only while it loads weights.
    config = tiny_config(kind, tie_word_embeddings=False)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    tokens = torch.arange(12).view(2, 6) * 7 % 64 + 3
    found, told, taken = {}, "", 0
    for backend in ("gloo", "nvls"):
        group: Any = dist.new_group(backend=backend)
        model: Any = tiny_model(cls, config)
        with world_of(group), torch.no_grad():
            found["alone"] = model(tokens).logits
            # What `from_pretrained(..., distributed_config=plan)` does before it loads weights.
            plan = DistributedConfig(tp_plan="auto", tp_size=2)
            plan, _, meshes = cls.prepare_distribute_model(plan)
            model = cls.maybe_distribute_model(model, plan, meshes)
            found[backend] = model(tokens).logits + 0.0
        if backend == "nvls":
            told, taken = group.explain(), sum(group.taken.values())
        dist.destroy_process_group(group)
    # Two addends have one order, and gloo rounds their sum once, too.
    assert torch.equal(found["nvls"], found["gloo"]), told
    # Sums of up to 64 products in halves, in some 4 places, each off by 64 * 2^-24 of values
    # that are at most a few units before a norm.
    torch.testing.assert_close(found["nvls"], found["alone"], rtol=0, atol=8 * 64 * 2.0**-24)
    # The plan of gpt_oss gathers the logits, and divides no layer.
    assert taken >= (1 if kind == "gpt_oss" else 2 * config.num_hidden_layers), told


@pytest.mark.parametrize("kind", models("pcomm-nvls", (*FEW, *MORE), FEW))
@ranks(2, leaves="torch keeps the meshes of DTensors in a cache")
def test_works_with_a_model_under_its_own_plan_as_gloo_does(rank: int, kind: str) -> None:
    found = outcome(lambda: kind, check_model)
    if rank == 0:
        check_outcome("pcomm-nvls", kind, found)
