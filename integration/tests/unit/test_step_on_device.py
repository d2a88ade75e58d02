"""Steps by the kernels of a GPU, interpreted: the logits of the same layers apart, on the host."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_support.kernels import load_kernels
from integration_support.step_pools import StepPools
from integration_support.step_shapes import model_of, shard_of, tokens_of
from pcomm.core.testing import run_virtual
from pcomm.core.testing.assertions import assert_as_accurate
from pcomm.core.testing.virtual import VirtualCollectives
from pcomm.inference.attention.on_device import attend_on_device
from pcomm.inference.layers import ResidualStream
from pcomm.integration.models import attention
from pcomm.integration.models.language_model import LanguageModel

pytest.importorskip("triton", reason="triton has wheels for Linux only")


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Tensors of the host are taken for those of a GPU."""
    load_kernels(monkeypatch, is_interpreted=True)
    monkeypatch.setattr(ResidualStream, "takes", staticmethod(lambda x: True))
    monkeypatch.setattr(attention, "paged_attention", attend_on_device)
    return monkeypatch


# Prompts, some of more rows than a product of few takes; then decodes with and without a chunk.
ROUNDS: list[dict[int, list[int]]] = [
    {0: tokens_of(33, 1), 1: tokens_of(3, 2)},
    {0: [7], 1: [8]},
    {0: [5], 2: tokens_of(4, 3)},
]


def steps(model: LanguageModel) -> Tensor:
    pools = StepPools(model, 3, 48)
    return torch.cat([logits for new in ROUNDS for logits in pools.step(new).values()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["A", "A with everything", "GGGA", "experts"])
def test_logits_are_those_of_layers_apart(
    name: str, dtype: torch.dtype, on_device: pytest.MonkeyPatch
) -> None:
    found = steps(model_of(name, dtype))
    on_device.undo()
    if name == "experts" and dtype == torch.bfloat16:
        pytest.skip("a rounded logit of a router sends a token elsewhere")
    plain, exact = steps(model_of(name, dtype)), steps(model_of(name))
    assert_as_accurate(found, plain, exact, num_terms=16)


def test_ranks_that_share_a_model_add_up_before_they_norm(on_device: pytest.MonkeyPatch) -> None:
    from pcomm.core.kernel_launch import KernelLaunch

    one, turn = model_of("A with everything", torch.float32), threading.Lock()

    def alone(self: Any, run: Any = KernelLaunch.run) -> None:
        # The interpreter is not made for threads, as which these ranks run.
        with turn:
            run(self)

    on_device.setattr(KernelLaunch, "run", alone)

    def on_rank(collectives: VirtualCollectives) -> Tensor:
        return steps(shard_of(one, collectives))

    found = run_virtual(on_rank, 2)
    on_device.undo()
    plain, exact = steps(one), steps(model_of("A with everything"))
    for mine in found:
        assert_as_accurate(mine, plain, exact, num_terms=16)


def test_a_decode_of_attention_is_five_launches_a_layer(on_device: pytest.MonkeyPatch) -> None:
    from pcomm.core.kernel_launch import KernelLaunch

    launched: list[str] = []

    def noted(self: Any, run: Any = KernelLaunch.run) -> None:
        launched.append(self.kernel.__name__)
        run(self)

    model = model_of("A", torch.float32)
    pools = StepPools(model, 2, 8)
    pools.step({0: [1, 2], 1: [3]})
    on_device.setattr(KernelLaunch, "run", noted)
    pools.step({0: [4], 1: [5]})
    # Queries, keys and values; attention; into the stream, the MLP; then the head.
    layer = ["product_kernel", "decode_kernel", *3 * ["product_kernel"]]
    assert launched == [*layer, "product_kernel"]
