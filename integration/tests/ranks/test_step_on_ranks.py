"""Steps on two ranks of a tensor-parallel group give the logits and the text of one rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from integration_support.short_runs import tiny_config
from integration_support.step_pools import StepPools
from pcomm.core import connect
from pcomm.core.testing import ranks
from pcomm.inference import Engine, Request, SamplingParams
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import ParallelConfig
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.parallelize import build_model, open_run_groups

KINDS = {
    "hybrid": {"pattern": "GMA", "layers": 3, "qk_norm": True},
    "gpt": {"qkv_bias": True, "attention_gate": True, "tie_embeddings": True},
    "experts": {"experts": 4, "shared_expert_width": 16, "shared_expert_gate": True},
}
MODEL = {"mamba_groups": 2, "mamba_state_dim": 16, "init_std": 0.3}
# One token is fewer than ranks, and three do not divide.
ROUNDS = [{0: [3, 9, 40], 1: [7]}, {0: [5]}, {0: [6], 1: [8, 2, 300]}, {1: [1], 0: [4]}]


def steps(model: LanguageModel) -> list[Tensor]:
    pools = StepPools(model, 2, 16)
    return [logits for new in ROUNDS for logits in pools.step(new).values()]


def text(model: LanguageModel) -> list[int]:
    engine = Engine(
        model,
        vocabulary=320,
        max_model_len=40,
        num_blocks=16,
        num_state_slots=4,
        max_batch_tokens=4,
    )
    for n in range(3):
        params = SamplingParams(temperature=0.5, seed=n, max_tokens=9)
        engine.add(Request(str(n), (5, 6, 7 + n), params))
    found = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            found += output.token_ids
    return found


def results(kind: str, parallel: ParallelConfig) -> tuple[list[Tensor], list[int]]:
    """Logits in fp64 and text in fp32, on this rank of whatever world there is."""
    with connect() as world:
        config = validate(tiny_config(parallel, model={**MODEL, **KINDS[kind]}), world.size)
        with open_run_groups(config, world) as groups:
            exact, model = (
                build_model(config, groups, world.device, dtype=dtype).eval()
                for dtype in (torch.float64, torch.float32)
            )
            return steps(exact), text(model)


@pytest.fixture(scope="module")
def single() -> dict[str, tuple[list[Tensor], list[int]]]:
    """The same on one process, which never touches torch.distributed."""
    return {kind: results(kind, ParallelConfig()) for kind in KINDS}


@pytest.mark.parametrize(("kind", "ep"), [*((kind, 1) for kind in KINDS), ("experts", 2)])
@ranks(2)
def test_two_ranks_write_the_text_of_one(rank, kind, ep, single):
    logits, tokens = results(kind, ParallelConfig(tp=2, ep=ep))
    expected, their_tokens = single[kind]
    assert len({*tokens}) > 5
    assert tokens == their_tokens
    for mine, theirs in zip(logits, expected, strict=True):
        assert mine.shape == theirs.shape
        assert (mine - theirs).abs().max() <= 1e-11 * theirs.abs().max()
