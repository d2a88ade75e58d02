"""Muon beside AdamW: a step is compared with torch's own two, on one matrix at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from integration_support.short_runs import open_trainer, run_words, tiny_config, write_words
from pcomm.core.errors import ConfigError, PcommError, UnsupportedError
from pcomm.core.testing import ranks
from pcomm.integration.checkpoint.folders import newest
from pcomm.integration.config.rules import validate, validate_resilient
from pcomm.integration.config.sections import Config, ParallelConfig
from pcomm.integration.config.toml import apply_overrides
from pcomm.integration.forecast.counted_step import count_step
from pcomm.integration.forecast.dry_run import synthetic_batches
from pcomm.integration.metrics.rows import read_rows
from pcomm.integration.train.trainer import Trainer

STEPS = 3
RATES = {"optimizer": "muon", "learning_rate": 1e-2, "muon_learning_rate": 0.05}
MUONS = re.compile(
    r"blocks\.\d+\.(mixer\.(qkv|input|output)|mlp\.(shared\.)?(gate_up|down))\.weight"
)
MODELS = {
    "A": {"attention_gate": True, "kv_heads": 2, "qkv_bias": True},
    "GM": {"pattern": "GM", "mlp_width": "none"},
    "experts": {"experts": 4, "expert_width": 32, "shared_expert_width": 24, "moe_every": 2},
}


def muon_config(parallel: ParallelConfig | None = None, **model: object) -> Config:
    return tiny_config(parallel, model=model, warmup_steps=1, **RATES)


def rows_of(name: str, trainer: Trainer) -> list[int]:
    """Rows of the matrices in a weight, counted from the sizes of the configuration."""
    model = trainer.config.model
    module = trainer.model.get_submodule(name.removesuffix(".weight"))
    heads, key_heads, width = model.heads, model.kv_heads, model.head_dim
    if name.endswith("qkv.weight"):
        gate = [heads] if model.attention_gate else []
        return [count * width for count in (heads, key_heads, key_heads, *gate)]
    if name.endswith("gate_up.weight"):
        return [module.weight.shape[0] // 2] * 2
    if not name.endswith("input.weight"):
        return [module.weight.shape[0]]
    if model.pattern[int(name.split(".")[1])] == "G":
        keys, values = (
            (model.gdn_key_heads, model.gdn_key_dim),
            (model.gdn_value_heads, model.gdn_value_dim),
        )
        key, value = keys[0] * keys[1], values[0] * values[1]
        return [key, key, value, value, model.gdn_value_heads, model.gdn_value_heads]
    inner, groups = (
        model.mamba_heads * model.mamba_head_dim,
        model.mamba_groups * model.mamba_state_dim,
    )
    return [inner, inner, groups, groups, model.mamba_heads]


class Separate:
    """The parameters of a trainer as torch's optimizers would have them: each matrix by itself."""

    def __init__(self, trainer: Trainer) -> None:
        train = trainer.config.train
        named = dict(trainer.replicas.named_parameters())
        self.parts = {
            name: [nn.Parameter(part) for part in p.detach().clone().split(rows_of(name, trainer))]
            if MUONS.fullmatch(name)
            else [nn.Parameter(p.detach().clone())]
            for name, p in named.items()
        }
        muons = [p for name, parts in self.parts.items() if MUONS.fullmatch(name) for p in parts]
        others = [
            p for name, parts in self.parts.items() if not MUONS.fullmatch(name) for p in parts
        ]
        assert muons
        assert others
        self.muon = torch.optim.Muon(
            muons, lr=train.muon_learning_rate, momentum=0.95, weight_decay=train.weight_decay
        )
        groups = [
            {"params": [p for p in others if p.dim() >= 2], "weight_decay": train.weight_decay},
            {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=train.learning_rate, betas=train.betas)

    def step(self, gradients: dict[str, Tensor], factor: float) -> None:
        for optimizer, peak in ((self.muon, 0.05), (self.adamw, 1e-2)):
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
        for name, parts in self.parts.items():
            pieces = gradients[name].split([len(part) for part in parts])
            for part, piece in zip(parts, pieces, strict=True):
                part.grad = piece.clone()
        self.muon.step()
        self.adamw.step()

    def differences(self, trainer: Trainer) -> Iterator[tuple[str, float]]:
        for name, parameter in trainer.replicas.named_parameters():
            yield name, float((parameter - torch.cat([*self.parts[name]])).detach().abs().max())


def follow(trainer: Trainer, *, exact: bool) -> None:
    """Train some steps, and compare each parameter with torch's own optimizers after each."""
    own = Separate(trainer)
    for index in range(STEPS):
        trainer.accumulate(index)
        norm = trainer.replicas.finish()
        trainer.replicas.clip(1.0, norm)
        named = dict(trainer.replicas.named_parameters())
        gradients = {name: p.grad.as_subclass(Tensor).clone() for name, p in named.items()}
        rate = trainer.set_learning_rate(index)
        trainer.optimizer.step()
        own.step(gradients, rate / 1e-2)
        for name, difference in own.differences(trainer):
            # AdamW's fused kernel rounds otherwise than the one of single tensors.
            allowed = 0.0 if exact and MUONS.fullmatch(name) else 1e-12
            assert difference <= allowed, (index, name, difference)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_torchs_optimizers_on_separate_matrices(name, run_dir):
    with open_trainer(muon_config(**MODELS[name]), run_dir, torch.float64) as trainer:
        follow(trainer, exact=True)


@pytest.mark.parametrize("kind", ["dp", "cp", "ep"])
@ranks(2)
def test_so_it_is_on_two_ranks_whose_parameters_stay_the_same(rank, kind, run_dir):
    parallel = {
        "dp": ParallelConfig(dp=2),
        "cp": ParallelConfig(cp=2),
        "ep": ParallelConfig(dp=2, ep=2),
    }[kind]
    model = MODELS["experts"] if kind == "ep" else {}
    with open_trainer(muon_config(parallel, **model), run_dir, torch.float64) as trainer:
        follow(trainer, exact=True)
        everyone = trainer.groups["dp_cp_tp"].collectives
        for name, parameter in trainer.replicas.named_parameters():
            if MUONS.fullmatch(name):
                both = everyone.all_gather(parameter.detach().contiguous())
                assert torch.equal(*both.chunk(2)), name


def test_a_run_goes_on_bit_for_bit(tmp_path):
    text = write_words(tmp_path / "text")
    words = ("train.optimizer=muon", "train.eval_every=none", "train.schedule=constant")
    for name, stops in (("whole", [6]), ("parts", [3, 6])):
        for steps in stops:
            run_words(text, tmp_path / name, *words, f"train.steps={steps}")
    rows = [
        [(row["loss"], row["grad_norm"]) for row in read_rows(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "parts")
    ]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 6
    files = [
        {file.name: file.read_bytes() for file in newest(tmp_path / name).folder.glob("*.distcp")}
        for name in ("whole", "parts")
    ]
    assert files[0]
    assert files[0] == files[1]
    with pytest.raises(ConfigError, match=r"train\.optimizer was 'muon' and is 'adamw'"):
        run_words(text, tmp_path / "parts", "train.steps=9")


def test_a_dry_run_counts_one_momentum_for_a_matrix_and_two_averages_for_the_rest():
    resolved = {
        name: validate(tiny_config(**({} if name == "adamw" else RATES)), 1)
        for name in ("adamw", "muon")
    }
    state = {
        name: count_step(config, synthetic_batches(config)).memory.optimizer
        for name, config in resolved.items()
    }
    model = resolved["muon"].model
    keys = 2 * model.kv_heads * model.head_dim
    in_block = (2 * model.width + keys + 3 * model.mlp_width) * model.width
    # One of AdamW's two averages in fp32, and the count of steps of four weights.
    assert state["adamw"] - state["muon"] == model.layers * (in_block * 4 + 4 * 4)


REFUSED = [
    (["parallel.tp=2"], 2, UnsupportedError, "parallel.tp over 2 ranks"),
    (["parallel.data=shard"], 2, UnsupportedError, "parallel.data = 'shard' over 2 ranks"),
    (
        ["parallel.data=hybrid", "parallel.shard_ranks=2"],
        4,
        UnsupportedError,
        "parallel.data = 'hybrid' over 2 ranks",
    ),
    (
        ["train.optimizer=adamw", "train.muon_momentum=0.9"],
        1,
        ConfigError,
        "train.muon_momentum: the value 0.9 with train.optimizer = 'adamw'",
    ),
]


@pytest.mark.parametrize(("overrides", "number", "kind", "said"), REFUSED)
def test_what_has_no_whole_matrices_is_refused(overrides, number, kind, said):
    config = apply_overrides(tiny_config(), ["train.optimizer=muon", *overrides])
    with pytest.raises(PcommError, match=re.escape(said)) as raised:
        validate(config, number)
    assert isinstance(raised.value, kind)


def test_shards_on_one_rank_are_whole(run_dir):
    assert validate(muon_config(ParallelConfig(data="shard")), 1).parallel.shard_ranks == 1
    with open_trainer(muon_config(ParallelConfig(data="shard")), run_dir, torch.float64) as trainer:
        follow(trainer, exact=True)


def test_a_resilient_run_has_no_muon():
    with pytest.raises(UnsupportedError, match=r"train\.optimizer: the value 'muon'"):
        validate_resilient(muon_config(), 2)
