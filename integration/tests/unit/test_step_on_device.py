"""Steps by the kernels of a GPU, interpreted: the logits of the same layers apart, on the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_support.kernels import interpreted_kernels
from integration_support.step_pools import StepPools
from integration_support.step_shapes import model_of, shard_of, tokens_of
from pcomm.core.kernel_launch import KernelLaunch
from pcomm.core.testing import run_virtual
from pcomm.core.testing.assertions import assert_as_accurate
from pcomm.core.testing.virtual import VirtualCollectives
from pcomm.inference.attention.on_device import attend_on_device
from pcomm.inference.layers import ResidualStream
from pcomm.integration.models import attention
from pcomm.integration.models.language_model import LanguageModel

pytest.importorskip("triton", reason="triton has wheels for Linux only")


BF16, FP32 = torch.bfloat16, torch.float32


@contextmanager
def on_device() -> Iterator[pytest.MonkeyPatch]:
    """Tensors of the host are taken for those of a GPU."""
    with interpreted_kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResidualStream, "takes", staticmethod(lambda x: True))
        patch.setattr(attention, "paged_attention", attend_on_device)
        yield patch


# Prompts, some of more rows than a product of few takes; then decodes with and without a chunk.
Rounds = Sequence[dict[int, list[int]]]
ROUNDS: Rounds = [
    {0: tokens_of(33, 1), 1: tokens_of(3, 2)},
    {0: [7], 1: [8]},
    {0: [5], 2: tokens_of(4, 3)},
]
FEW_ROWS: Rounds = [{0: tokens_of(2, 1), 1: tokens_of(1, 2)}, {0: [7], 2: tokens_of(2, 3)}]


def steps(model: LanguageModel, rounds: Rounds = ROUNDS) -> Tensor:
    pools = StepPools(model, 3, 48)
    return torch.cat([logits for new in rounds for logits in pools.step(new).values()])


# A rounded logit of a router would send a token elsewhere, so experts are in fp32 alone.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("A with everything", BF16),
        ("GGGA", FP32),
        ("experts", FP32),
        pytest.param("A", FP32, marks=pytest.mark.soak),
        pytest.param("A", BF16, marks=pytest.mark.soak),
        pytest.param("A with everything", FP32, marks=pytest.mark.soak),
        pytest.param("GGGA", BF16, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_logits_are_those_of_layers_apart(name: str, dtype: torch.dtype) -> None:
    with on_device():
        found = steps(model_of(name, dtype))
    plain, exact = steps(model_of(name, dtype)), steps(model_of(name))
    assert_as_accurate(found, plain, exact, num_terms=16)


@pytest.mark.parametrize(
    "rounds", [FEW_ROWS, pytest.param(ROUNDS, marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_ranks_that_share_a_model_add_up_before_they_norm(rounds: Rounds) -> None:
    one, turn = model_of("A with everything", FP32), threading.Lock()

    def alone(self: Any, run: Any = KernelLaunch.run) -> None:
        # The interpreter is not made for threads, as which these ranks run.
        with turn:
            run(self)

    def on_rank(collectives: VirtualCollectives) -> Tensor:
        return steps(shard_of(one, collectives), rounds)

    with on_device() as patch:
        patch.setattr(KernelLaunch, "run", alone)
        found = run_virtual(on_rank, 2)
    plain, exact = steps(one, rounds), steps(model_of("A with everything"), rounds)
    for mine in found:
        assert_as_accurate(mine, plain, exact, num_terms=16)


def test_a_decode_of_attention_is_five_launches_a_layer() -> None:
    launched: list[str] = []

    def noted(self: Any, run: Any = KernelLaunch.run) -> None:
        launched.append(self.kernel.__name__)
        run(self)

    with on_device() as patch:
        model = model_of("A", FP32)
        pools = StepPools(model, 2, 8)
        pools.step({0: [1, 2], 1: [3]})
        patch.setattr(KernelLaunch, "run", noted)
        pools.step({0: [4], 1: [5]})
    # Queries, keys and values; attention; into the stream, the MLP; then the head.
    layer = ["product_kernel", "decode_kernel", *3 * ["product_kernel"]]
    assert launched == [*layer, "product_kernel"]
