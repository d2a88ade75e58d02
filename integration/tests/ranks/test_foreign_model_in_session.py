"""A model from a Hugging Face directory trains on when a rank dies, and goes back to one."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from pcomm.core import Groups, Topology
from pcomm.core.process import RankPlace, ResilientRanks
from pcomm.core.testing.programs import scaled_s
from pcomm.ntp import NtpPlan, Session, TrainState, nonuniform, units_of, whole_state_dict

PRELOAD = ("torch._dynamo", "transformers.models.llama.modeling_llama")
QUERIES, KEYS, DIM, WIDTH, HIDDEN, VOCABULARY = 6, 3, 2, 12, 10, 11
STEPS, SEQUENCES, LENGTH, MAX_NORM = 4, 6, 5, 0.5


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


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)


def loss_of(model: nn.Module, ids_SL: Tensor) -> Tensor:
    """Nats of these sequences over the tokens of all."""
    logits = model(ids_SL[:, :-1]).logits.flatten(0, 1)
    return F.cross_entropy(logits, ids_SL[:, 1:].flatten(), reduction="sum") / SEQUENCES / LENGTH


def build(directory: Path, plan: NtpPlan, groups: Groups, rank: int) -> TrainState:
    whole = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64)
    model = nonuniform(whole, plan, groups["tp"].collectives, rank=rank)
    return TrainState(model, optimizer_of(model))


def train(place: RankPlace, directory: Path) -> tuple[Any, list[float], list[float]]:
    """Degrees, norms, and the losses of this rank's replica; the trained model as a directory."""
    norms, losses = [], []
    units = units_of(LlamaForCausalLM.from_pretrained(directory))
    topology = Topology({"dp": 2, "tp": 2})
    with Session(place, topology, units, partial(build, directory)) as session:
        for attempt in session.attempts(until=STEPS):
            with attempt as step:
                own = session.plan.place(session.rank)
                shares = session.plan.token_shares(SEQUENCES)
                loss = loss_of(session.model, batch(step.number).split(shares)[own.replica])
                if (session.rank, step.number) == (3, 2):
                    os.kill(os.getpid(), signal.SIGKILL)
                step.backward(loss)
                norms.append(float(step.commit(max_norm=MAX_NORM)))
                losses.append(float(loss.detach()))
        model = session.model
        state = whole_state_dict(model, session.groups["tp"].collectives)
        torch.save(state, directory / f"{session.rank}.pt")
        if session.rank == 0:
            model.save_pretrained(directory / "trained", state_dict=state)
        return session.plan.degrees, norms, losses


def train_dense() -> tuple[nn.Module, list[float], list[float]]:
    """The model as it is, by torch alone."""
    model, norms, losses = llama(), [], []
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        loss = loss_of(model, batch(step))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return model, norms, losses


def test_a_llama_trains_on_as_one_process_would_when_a_rank_is_killed(tmp_path):
    llama().save_pretrained(tmp_path)
    with ResilientRanks(4, preload=PRELOAD) as ranks:
        ranks.start(train, (tmp_path,))
        reports = ranks.wait(timeout_s=scaled_s(60.0))
    assert reports[3].reason == "killed by SIGKILL"
    dense, dense_norms, dense_losses = train_dense()
    # Its norm layers compute in fp32, where a last bit of a sum of other order may show.
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=1e-6)
    for rank in range(3):
        assert reports[rank].has_finished, reports[rank]
        degrees, norms, _ = reports[rank].result
        assert degrees == ((2,), (1,))
        close(norms, dense_norms, atol=0)
        close(torch.load(tmp_path / f"{rank}.pt"), dict(dense.state_dict()))
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "trained", dtype=torch.float64)
    close(dict(saved.state_dict()), dict(dense.state_dict()))
    losses = zip(reports[0].result[2], reports[2].result[2], strict=True)
    close([sum(parts) for parts in losses], dense_losses, atol=0)
