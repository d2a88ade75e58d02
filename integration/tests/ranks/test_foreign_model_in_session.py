"""A model of Hugging Face, its linear layers swapped, trains on when a rank dies."""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from pcomm.core import Groups, Topology
from pcomm.core.process import RankPlace, ResilientRanks
from pcomm.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    param_layouts_of,
    take_shard,
)
from pcomm.core.testing.programs import scaled_s
from pcomm.ntp import NtpPlan, Session, TrainState, Units

PRELOAD = ("torch._dynamo", "transformers.models.llama.modeling_llama")
QUERIES, KEYS, DIM, WIDTH, HIDDEN, VOCABULARY = 6, 3, 2, 12, 10, 11
STEPS, SEQUENCES, LENGTH, MAX_NORM = 4, 6, 5, 0.5
# A key head stays with its query heads.
UNITS = {
    "*.q_proj.weight": Units.columns(QUERIES * DIM, block=QUERIES // KEYS * DIM),
    "*.[kv]_proj.weight": Units.columns(KEYS * DIM, block=DIM),
    "*.o_proj.weight": Units.columns(QUERIES * DIM, block=QUERIES // KEYS * DIM),
    "*.mlp.*.weight": Units.columns(HIDDEN),
}


def llama() -> nn.Module:
    """The whole model, equal in each process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=QUERIES,
        num_key_value_heads=KEYS,
        head_dim=DIM,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
    )
    model: nn.Module = LlamaForCausalLM(config).double()
    return model


def swap_linears(model: nn.Module, plan: NtpPlan, groups: Groups, rank: int) -> None:
    """Replace each linear layer that has units by this rank's part of it."""
    place, over = plan.place(rank), groups["tp"].collectives
    for name, whole in list(model.named_modules()):
        if isinstance(whole, nn.Linear) and plan.units_of(f"{name}.weight"):
            layout = plan.layout(f"{name}.weight", place.replica)
            own: nn.Module
            if name.endswith(("o_proj", "down_proj")):
                own = RowParallelLinear(layout, whole.out_features, over, dtype=torch.float64)
            else:
                own = ColumnParallelLinear(whole.in_features, layout, over, dtype=torch.float64)
            dim = own.param_layouts["weight"].dim
            own.weight.data.copy_(take_shard(whole.weight.data, layout, place.index, dim=dim))
            model.set_submodule(name, own)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)


def loss_of(model: nn.Module, ids_SL: Tensor) -> Tensor:
    """Nats of these sequences over the tokens of all."""
    logits = model(ids_SL[:, :-1]).logits.flatten(0, 1)
    return F.cross_entropy(logits, ids_SL[:, 1:].flatten(), reduction="sum") / SEQUENCES / LENGTH


def build(plan: NtpPlan, groups: Groups, rank: int) -> TrainState:
    model = llama()
    swap_linears(model, plan, groups, rank)
    return TrainState(model, optimizer_of(model))


def train(place: RankPlace) -> tuple[tuple[tuple[int, ...], ...], list[float], float]:
    """Degrees, norms, and the largest difference of this rank's shards from one process alone."""
    norms = []
    with Session(place, Topology({"dp": 2, "tp": 2}), UNITS, build) as session:
        for attempt in session.attempts(until=STEPS):
            with attempt as step:
                own = session.plan.place(session.rank)
                shares = session.plan.token_shares(SEQUENCES)
                loss = loss_of(session.model, batch(step.number).split(shares)[own.replica])
                if (session.rank, step.number) == (3, 2):
                    os.kill(os.getpid(), signal.SIGKILL)
                step.backward(loss)
                norms.append(float(step.commit(max_norm=MAX_NORM)))
        whole, _ = train_dense()
        found, layouts = 0.0, param_layouts_of(session.model)
        index = session.plan.place(session.rank).index
        for name, one in session.model.named_parameters():
            expected, split = whole[name], layouts[name]
            if split.layout is not None:
                expected = take_shard(expected, split.layout, index, dim=split.dim)
            found = max(found, float((one - expected).abs().max()))
        return session.plan.degrees, norms, found


def train_dense() -> tuple[dict[str, nn.Parameter], list[float]]:
    """The model as it is, by torch alone."""
    model, norms = llama(), []
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        loss_of(model, batch(step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters()), norms


def test_a_llama_trains_on_as_one_process_would_when_a_rank_is_killed():
    with ResilientRanks(4, preload=PRELOAD) as ranks:
        ranks.start(train)
        reports = ranks.wait(timeout_s=scaled_s(60.0))
    assert reports[3].reason == "killed by SIGKILL"
    _, dense = train_dense()
    for rank in range(3):
        assert reports[rank].has_finished, reports[rank]
        degrees, norms, difference = reports[rank].result
        assert degrees == ((2,), (1,))
        # Its norm layers compute in fp32, where a last bit of a sum of other order may show.
        torch.testing.assert_close(norms, dense, rtol=1e-6, atol=0)
        assert difference < 1e-6
