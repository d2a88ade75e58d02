"""Models of transformers, split by their own plan, train as one process does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from core_support.works_with import check_outcome, models, outcome
from ntp_support.foreign_training import (
    assert_trains_like_one_process,
    causal_families,
    foreign_model,
    plan_for,
)
from ntp_support.refusals import refused
from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ConfigError, LayoutError, TopologyError, UnsupportedError
from pcomm.core.testing.virtual import run_virtual
from pcomm.core.topology import Topology
from pcomm.ntp import (
    Failures,
    Units,
    load_whole_state_dict,
    nonuniform,
    plan,
    units_of,
    whole_state_dict,
)

# Each another mechanism: grouped heads, norms of heads, fused and gathered weights, latent keys,
# three forms of experts, sinks, heads with their own three rows, biases, a tied head, GDN.
CHOSEN = (
    "llama",
    "qwen3",
    "phi3",
    "deepseek_v2",
    "mixtral",
    "aria_text",
    "longcat_flash",
    "granite_swa",
    "gpt_neox",
    "starcoder2",
    "gemma2",
    "qwen3_next",
)
REFUSED = {
    "apertus": "mlp.up_proj.*colwise.*act_fn.alpha_p",
    "doge": "self_attn.q_proj.*colwise.*self_attn.A",
    "inkling_text": "experts.down_proj.*rowwise.*24 and 48 columns",
    "inkling2_text": "experts.down_proj.*rowwise.*24 and 48 columns",
}


@pytest.mark.parametrize("kind", CHOSEN)
def test_two_steps_equal_one_process(kind: str) -> None:
    # Four key heads: two and two, and two, one and one.
    assert_trains_like_one_process(foreign_model(kind, key_heads=4), (2, 3))


@pytest.mark.parametrize(
    "kind", models("pcomm-ntp", causal_families(), ("olmo2", "bloom", "apertus", "inkling_text"))
)
def test_works_with_a_family_as_one_process_or_refuses_it(kind: str) -> None:
    found = outcome(
        lambda: foreign_model(kind), lambda whole: assert_trains_like_one_process(whole, (2, 1))
    )
    check_outcome("pcomm-ntp", kind, found)


def test_a_replica_of_three_degrees() -> None:
    assert_trains_like_one_process(foreign_model("qwen3", key_heads=4), (3, 2, 4))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_plan_cannot_express_is_refused_by_name(kind: str) -> None:
    refused(UnsupportedError, REFUSED[kind], units_of, foreign_model(kind))


def test_a_plan_that_is_completed_by_the_caller() -> None:
    """The refusal's own advice: the activation's parameters work on parts."""
    whole: Any = foreign_model("apertus")
    whole.tp_plan |= {"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}
    assert_trains_like_one_process(whole, (2, 1))


# -- units -----------------------------------------------------------------------------------


def llama(**beside: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 11,
        "hidden_size": 12,
        "intermediate_size": 10,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 2,
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | beside)).double()


def test_query_heads_stay_with_their_key_head() -> None:
    layer = "model.layers.*"
    assert units_of(llama()) == {
        f"{layer}.self_attn.q_proj.weight": Units.columns(12, block=4, work=2 * 12 * 12),
        f"{layer}.self_attn.k_proj.weight": Units.columns(6, block=2, work=2 * 6 * 12),
        f"{layer}.self_attn.v_proj.weight": Units.columns(6, block=2, work=2 * 6 * 12),
        f"{layer}.self_attn.o_proj.weight": Units.columns(12, block=4, work=2 * 12 * 12),
        f"{layer}.mlp.gate_proj.weight": Units.columns(10, work=2 * 10 * 12),
        f"{layer}.mlp.up_proj.weight": Units.columns(10, work=2 * 10 * 12),
        f"{layer}.mlp.down_proj.weight": Units.columns(10, work=2 * 10 * 12),
        "lm_head.weight": Units.columns(11, work=11 * 12),
    }


def test_layers_that_differ_are_named_one_by_one() -> None:
    whole = llama()
    mlp: Any = whole.model.layers[1].mlp
    mlp.gate_proj, mlp.up_proj = nn.Linear(12, 8, bias=False), nn.Linear(12, 8, bias=False)
    mlp.down_proj = nn.Linear(8, 12, bias=False)
    found = units_of(whole)
    assert found["model.layers.0.mlp.up_proj.weight"].count == 10
    assert found["model.layers.1.mlp.up_proj.weight"].count == 8
    assert_trains_like_one_process(whole.double(), (2, 1))


def test_a_head_that_is_tied_stays_whole() -> None:
    whole = llama(tie_word_embeddings=True)
    assert "lm_head.weight" not in units_of(whole)
    assert_trains_like_one_process(whole, (3, 2))


# -- bad input -------------------------------------------------------------------------------


def _hooked(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)


def _foreign_style(model: Any) -> None:
    model._tp_plan["model.layers.*.mlp.up_proj"] = "local_colwise"


def _other_class(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj = nn.Bilinear(12, 12, 12)


def _without_its_reader(model: Any) -> None:
    del model._tp_plan["model.layers.*.mlp.down_proj"]


def _without_a_gate(model: Any) -> None:
    del model._tp_plan["model.layers.*.mlp.gate_proj"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_hooked, "layers.0.mlp.up_proj.*colwise.*hooks"),
        (_foreign_style, "layers.0.mlp.up_proj.*local_colwise.*no uneven form"),
        (_other_class, "layers.1.self_attn.q_proj.*colwise.*Bilinear"),
        (_without_its_reader, "mlp.*colwise.*leaves out"),
        (_without_a_gate, "mlp.*gate_proj.weight.*leaves out"),
    ],
)
def test_a_model_that_cannot_be_split_is_left_as_it_is(
    change: Callable[[Any], None], words: str
) -> None:
    made = plan_for((1, 1), llama())
    whole = llama()
    change(whole)
    before, modules = copy.deepcopy(whole.state_dict()), list(whole.modules())
    refused(UnsupportedError, words, nonuniform, whole, made, IdentityCollectives(), rank=0)
    assert list(whole.modules()) == modules
    assert all(torch.equal(one, before[name]) for name, one in whole.state_dict().items())


def test_misuse_is_refused_before_anything_changes() -> None:
    over, whole = IdentityCollectives(), llama()
    made = plan_for((1, 1), whole)
    other = plan_for((1, 1), llama(num_key_value_heads=6))
    refused(ConfigError, "q_proj.*plan that has 6 units", nonuniform, whole, other, over, rank=0)
    wide = plan_for((2, 1), whole)
    refused(TopologyError, "index 0 of a group of 2", nonuniform, whole, wide, over, rank=0)
    topology = Topology({"dp": 1, "tp": 1, "pp": 2})
    staged = plan(topology, Failures(), units_of(whole))
    refused(ConfigError, "pipeline stages", nonuniform, whole, staged, over, rank=0)
    assert type(whole.lm_head) is nn.Linear
    nonuniform(whole, made, over, rank=0)
    refused(UnsupportedError, "split already", nonuniform, whole, made, over, rank=0)


# -- the whole state -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "aria_text", "gemma2", "granite_swa"])
def test_the_whole_state_comes_back_bit_for_bit(kind: str) -> None:
    whole, other = foreign_model(kind, key_heads=4), foreign_model(kind, key_heads=4)
    with torch.no_grad():
        for own in other.parameters():
            own.neg_()
    made = plan_for((3,), whole)
    copies = [copy.deepcopy(whole) for _ in range(3)]

    def task(over: Collectives) -> None:
        own = nonuniform(copies[over.rank], made, over, rank=over.rank)
        for expected in (whole, other):
            load_whole_state_dict(own, expected.state_dict(), over)
            found = whole_state_dict(own, over)
            assert list(found) == list(expected.state_dict())
            for name, one in expected.state_dict().items():
                assert torch.equal(found[name], one), name
        state = whole.state_dict()
        gone = state.popitem()
        refused(ConfigError, gone[0], load_whole_state_dict, own, state, over)
        state[gone[0]] = gone[1][:-1]
        refused(LayoutError, "of which a rank has a part", load_whole_state_dict, own, state, over)

    run_virtual(task, 3)
