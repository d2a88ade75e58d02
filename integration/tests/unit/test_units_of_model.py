"""The units of a model cut its parameters as its own layers do, at every degree."""

from __future__ import annotations

import pytest

from integration_support.short_runs import UNEVEN_SIZES
from pcomm.core import IdentityCollectives, Topology
from pcomm.core.tensor_parallel import param_layouts_of
from pcomm.integration.config.model_rules import resolve_model
from pcomm.integration.config.sections import ModelConfig
from pcomm.integration.config.units import units_of_model
from pcomm.integration.models.language_model import LanguageModel
from pcomm.ntp import Failures, plan

VOCABULARY = 29
TP = 4
MODELS = {
    "gpt": {"pattern": "A", "qkv_bias": True, "qk_norm": True},
    "gpt, gated and tied": {"pattern": "A", "attention_gate": True, "tie_embeddings": True},
    "gdn": {"pattern": "G", "gdn_value_heads": 15},
    "mamba": {"pattern": "M"},
    "mamba without MLP": {"pattern": "M", "mamba_conv_bias": False, "mlp_width": "none"},
    "hybrid": {"pattern": "GGAM", "layers": 4},
    "experts": {"experts": 4, "moe_every": 2, "shared_expert_width": 9, "shared_expert_gate": True},
    "experts alone": {"experts": 4, "shared_expert_width": 11},
}


class _OneOf(IdentityCollectives):
    """A rank of a group that only says how large it is."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("name", MODELS)
def test_layers_and_plan_cut_alike(name):
    config = resolve_model(ModelConfig(**{**UNEVEN_SIZES, **MODELS[name]}))
    topology = Topology({"dp": TP, "tp": TP})
    failed = [TP * replica + gone for replica in range(TP) for gone in range(replica)]
    # Replica r has lost r ranks, so every degree is there.
    made = plan(topology, Failures.from_global_ranks(failed), units_of_model(config, VOCABULARY))
    seen = set()
    for replica in range(TP):
        degree = made.degree(replica)
        assert degree == TP - replica
        for rank in range(degree):
            model = LanguageModel(config, VOCABULARY, _OneOf(rank, degree))
            shapes = {name: p.shape for name, p in model.named_parameters()}
            for parameter, own in param_layouts_of(model).items():
                found = made.units_of(parameter)
                if own.layout is None or own.scope == "expert":
                    assert found is None, parameter
                    continue
                assert found is not None, parameter
                seen.add(found[0])
                assert own.layout == made.layout(parameter, replica), parameter
                assert shapes[parameter][own.dim] == own.layout.sizes[rank]
    assert seen == {key for key, _ in made.units}, "every key names a parameter"


def test_the_degree_four_of_five_heads_is_as_fast_as_its_busiest_rank():
    """Work is what a token meets, so the pace of a replica follows from all of its layers."""
    config = resolve_model(ModelConfig(layers=2, width=16, heads=4, kv_heads=4, mlp_width=12))
    made = plan(
        Topology({"dp": 2, "tp": 4}), Failures.from_global_ranks([3]), units_of_model(config, 24)
    )
    # Weights of a token: attention 2 x 4 x 16 x 16, MLP 2 x 3 x 16 x 12, head 24 x 16. On three
    # ranks attention takes two heads where a rank had one, the others a third for a quarter.
    attention, others = 2 * 4 * 16 * 16, 2 * 3 * 16 * 12 + 24 * 16
    before = attention / 4 + others / 4
    after = attention / 2 + others / 3
    assert float(made.speeds[1]) == 1
    assert float(made.speeds[0]) == pytest.approx(before / after)


@pytest.mark.parametrize("name", ["gpt", "gdn", "mamba"])
def test_slow_ranks_hold_less_as_the_plan_says(name):
    config = resolve_model(ModelConfig(**{**UNEVEN_SIZES, **MODELS[name]}))
    made = plan(
        Topology({"dp": 2, "tp": 3}),
        Failures.from_global_ranks([5]),
        units_of_model(config, VOCABULARY),
        speeds={1: 0.5, 4: 0.25},
    )
    for replica in range(2):
        form = made.form(replica)
        assert len(set(form)) > 1
        for rank in range(len(form)):
            model = LanguageModel(config, VOCABULARY, _OneOf(rank, len(form)), form=form)
            for parameter, own in param_layouts_of(model).items():
                if own.layout is not None:
                    assert own.layout == made.layout(parameter, replica), parameter
                    assert len(set(own.layout.sizes)) > 1
