"""A model of transformers in the engine: what it keeps, what changes in it, what is refused."""

from __future__ import annotations

import copy
import pickle
import platform
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from inference_support.transformers_families import (
    WRITTEN,
    difference,
    engine_for,
    own_logits,
    prompts_for,
    tiny_family,
    write,
)
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.inference import Request, SamplingParams
from pcomm.inference.layers import pack_weights, quantize_int8
from pcomm.inference.transformers import TransformersModel

pytestmark = pytest.mark.filterwarnings("ignore")


def facts(model: PreTrainedModel) -> tuple[Any, ...]:
    """What a step touches in a model, and its parameters."""
    modules = list(model.modules())
    return (
        [module.training for module in modules],
        [module.__dict__.get("forward") for module in modules],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules],
        [getattr(module, "config", model.config)._attn_implementation for module in modules],
        dict(AttentionInterface._global_mapping),
        dict(AttentionMaskInterface._global_mapping),
        [(name, id(value), value._version) for name, value in model.named_parameters()],
    )


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba", "mamba"])
def test_drafts_and_cached_prefixes_change_no_token(family: str) -> None:
    model = tiny_family(family)
    # Texts that repeat themselves behind one long begin, so that drafts are made, and right or not.
    (begin,) = prompts_for([64])
    prompts = [begin + end * 3 for end in prompts_for([3, 4, 5], seed=1)]
    adapter = TransformersModel(model)
    engine = engine_for(adapter, num_state_slots=24, max_requests=4, speculative_tokens=3)
    for _ in range(2):
        assert difference(model, prompts, write(engine, prompts)) is None
    stats = engine.stats()
    assert stats.drafted_tokens > 0
    assert stats.cached_tokens > 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "bamba"])
def test_preemptions_change_no_token(family: str) -> None:
    model, prompts = tiny_family(family), prompts_for([6, 7, 5, 8])
    engine = engine_for(TransformersModel(model), num_blocks=12, max_model_len=32)
    assert difference(model, prompts, write(engine, prompts)) is None
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_the_model_is_its_owners_between_steps_and_behind_an_error(family: str) -> None:
    model, (prompt,) = tiny_family(family), prompts_for([30])
    model.train()
    model.model.layers[0].eval()
    mixer = model.model.layers[0].input_layernorm
    of_a_library = mixer.forward
    mixer.forward = lambda *given: of_a_library(*given)
    before = facts(model)
    adapter = TransformersModel(model)
    assert not any(module.training for module in model.modules())
    alone = own_logits(model, prompt)
    begun = facts(model)
    params = SamplingParams(temperature=0.0, max_tokens=WRITTEN, ignore_eos=True, logprobs=0)
    engine = engine_for(adapter)
    engine.add(Request("0", prompt, params))
    tokens: list[int] = []
    logprobs: list[float] = []
    fails = False

    def may_fail(*_: Any) -> None:
        if fails:
            raise RuntimeError("a hook of the owner")

    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
            logprobs += [entry.logprob for entry in output.logprobs]
        assert facts(model) == begun
        assert torch.equal(own_logits(model, prompt), alone)
        assert torch.equal(own_logits(copy.deepcopy(model), prompt), alone)
    assert difference(model, [prompt], [(tokens, logprobs)]) is None
    hook = model.model.layers[-1].register_forward_hook(may_fail)
    fails = True
    engine.add(Request("1", prompt, params))
    outputs = [output for _ in range(2) for output in engine.step()]
    assert [str(output.error) for output in outputs] == ["a hook of the owner"]
    hook.remove()
    assert facts(model) == begun
    engine.close()
    adapter.close()
    adapter.close()
    assert facts(model) == before


def test_two_engines_share_a_model_beside_one_of_another() -> None:
    models = [tiny_family("llama"), tiny_family("bamba")]
    adapters = [TransformersModel(models[n]) for n in (0, 0, 1)]
    prompts = prompts_for([9, 20, 5])
    wanted = [write(engine_for(a), [p])[0][0] for a, p in zip(adapters, prompts, strict=True)]
    engines = [engine_for(adapter) for adapter in adapters]
    params = SamplingParams(temperature=0.0, max_tokens=WRITTEN, ignore_eos=True)
    written: list[list[int]] = [[], [], []]
    for engine, prompt in zip(engines, prompts, strict=True):
        engine.add(Request("a", prompt, params))
    while any(engine.has_work for engine in engines):
        for engine, tokens in zip(engines, written, strict=True):
            for output in engine.step() if engine.has_work else ():
                tokens += output.token_ids
    assert written == wanted
    adapters[0].close()
    assert write(engine_for(adapters[1]), [prompts[1]])[0][0] == wanted[1]


@pytest.mark.parametrize("family", ["llama", "mamba2"])
@pytest.mark.parametrize("is_shared", [True, False], ids=["one model", "one configuration"])
def test_engines_in_threads_take_turns(family: str, is_shared: bool) -> None:
    first = tiny_family(family)
    other = first if is_shared else type(first)(first.config).eval()
    adapters = [TransformersModel(first), TransformersModel(other)]
    prompts, before = prompts_for([9, 20, 5]), facts(first)
    wanted = [write(engine_for(adapter), prompts) for adapter in adapters]
    engines = [engine_for(adapter) for adapter in adapters * 2]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(lambda engine: write(engine, prompts), engines))
    finally:
        sys.setswitchinterval(interval)
    assert found == wanted * 2
    assert facts(first) == before


@pytest.mark.parametrize("family", ["roberta", "gemma2", "falcon_h1"])
def test_padding_that_is_an_ordinary_number_and_fp64(family: str) -> None:
    model, prompts = tiny_family(family, pad_token_id=3).double(), prompts_for()
    engine = engine_for(TransformersModel(model))
    assert difference(model, prompts, write(engine, prompts)) is None


@pytest.mark.parametrize("function", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_copy_of_an_adapter_is_refused(function: Callable[[Any], Any]) -> None:
    adapter = TransformersModel(tiny_family("llama"))
    with pytest.raises(UnsupportedError, match="a copy of it"):
        function(adapter)


def rope(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        found |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        found |= {"original_max_position_embeddings": 32}
    return found


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_text_beyond_one_rotary_table_ends_alone(kind: str) -> None:
    longest = 32 if kind == "dynamic" else 128
    model = tiny_family("llama", rope_parameters=rope(kind), max_position_embeddings=longest)
    adapter = TransformersModel(model)
    assert adapter.max_tokens == 32
    prompts = prompts_for([1, 20, 28, 36])
    params = SamplingParams(temperature=0.0, max_tokens=WRITTEN, ignore_eos=True, logprobs=0)
    engine = engine_for(adapter)
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, params))
    written: dict[str, tuple[list[int], list[float]]] = {}
    errors: dict[str, str] = {}
    while engine.has_work:
        for output in engine.step():
            tokens, logprobs = written.setdefault(output.request_id, ([], []))
            tokens += output.token_ids
            logprobs += [entry.logprob for entry in output.logprobs]
            if output.error is not None:
                errors[output.request_id] = str(output.error)
    assert set(errors) == {"2", "3"}
    assert all("max_model_len=32" in error for error in errors.values())
    assert difference(model, prompts[:2], [written["0"], written["1"]]) is None


@pytest.mark.parametrize("family", ["llama", "bamba"])
def test_a_model_in_bf16_passes_the_comparison(family: str) -> None:
    model = tiny_family(family).bfloat16()
    adapter = TransformersModel(model)
    assert len(write(engine_for(adapter), prompts_for())[4][0]) == WRITTEN


def test_states_are_right_without_the_comparison() -> None:
    model, prompts = tiny_family("mamba"), prompts_for()
    engine = engine_for(TransformersModel(model, check=False))
    assert difference(model, prompts, write(engine, prompts)) is None


def test_a_wrong_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from pcomm.inference.transformers import attention_calls

    def with_window(*args: Any, **kwargs: Any) -> Any:
        return whole(*args, **kwargs | {"window": 5})

    whole = attention_calls.paged_attention
    monkeypatch.setattr(attention_calls, "paged_attention", with_window)
    model = tiny_family("llama")
    before = facts(model)
    with pytest.raises(ConfigError, match="apart from those of its own forward"):
        TransformersModel(model)
    assert facts(model) == before


def test_a_closed_adapter_and_a_model_in_training_mode_are_refused() -> None:
    model = tiny_family("llama")
    adapter = TransformersModel(model)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)

    def error() -> str:
        engine = engine_for(adapter)
        engine.add(Request("0", (5, 6, 7), params))
        return str(next(output.error for _ in range(2) for output in engine.step()))

    model.train()
    assert "model.eval()" in error()
    model.eval()
    assert error() == "None"
    adapter.close()
    assert "adapter that is closed" in error()


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (lambda: nn.Linear(2, 2), "no model of transformers"),
        (lambda: tiny_family("llama").to("meta"), "weights on meta"),
        (lambda: tiny_family("llama").model, "no logits of each token"),
        (lambda: tiny_family("bert", is_decoder=False), "tokens that come later"),
    ],
)
def test_other_modules_are_refused(model: Any, found: str) -> None:
    given = model()
    before = [module.training for module in given.modules()]
    with pytest.raises(ConfigError) as caught:
        TransformersModel(given)
    assert found in str(caught.value).splitlines()[0]
    assert [module.training for module in given.modules()] == before


def test_the_package_does_not_import_transformers() -> None:
    program = (
        "import sys, pcomm.inference; pcomm.inference.TransformersModel\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


on_x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="the form was compared on x86 alone"
)
REPLACED: list[Any] = [
    pytest.param(partial(pack_weights, batch_invariant=True), "PackedWeight", marks=on_x86),
    (quantize_int8, "Int8Weight"),
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("replace", "form"), REPLACED)
def test_weights_are_replaced_behind_the_adapter_and_not_before(
    replace: Callable[[nn.Module], tuple[str, ...]], form: str, tied: bool
) -> None:
    model, prompts = tiny_family("llama", tie_word_embeddings=tied), prompts_for([3, 20])
    before = copy.deepcopy(model)
    adapter = TransformersModel(model)
    names = replace(model)
    assert len(names) == 2 * 7 + 1
    # Of its own forward with the same products.
    assert difference(model, prompts, write(engine_for(adapter), prompts)) is None
    # As of one layer alone, whose parameter is the embedding's where it is tied.
    (head,) = replace(before, only=("lm_head",))
    for refused, number, name in ((before, 1, head), (model, len(names), names[0])):
        with pytest.raises(ConfigError) as caught:
            TransformersModel(refused)
        told = str(caught.value)
        assert f"{number} layers without the weights" in told
        assert f"the first of them '{name}' with a {form}" in told
        assert "Make the TransformersModel first" in told


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("replace", "form"), REPLACED)
def test_a_model_has_as_many_parameters_with_other_forms_of_weights(
    replace: Callable[[nn.Module], tuple[str, ...]], form: str, tied: bool
) -> None:
    """As transformers counts them, of a head that is the embedding and of one that is not."""
    model = tiny_family("llama", tie_word_embeddings=tied)
    embedding, count = model.get_input_embeddings().weight, model.num_parameters()
    replace(model)
    assert model.num_parameters() == count
    assert (model.lm_head.weight is embedding) == tied
    assert type(model.lm_head.weight_product).__name__ == form
    # The embedding's memory is there, and no other weight's.
    left = [name for name, one in model.named_parameters() if one.dim() > 1 and not one.is_meta]
    assert left == ["model.embed_tokens.weight"]
    with pytest.raises(UnsupportedError, match="state_dict"):
        model.lm_head.state_dict()


@on_x86
def test_batch_invariance_is_refused_where_the_model_behind_an_adapter_is_not_packed() -> None:
    model, sizes = tiny_family("llama"), {"max_batch_tokens": 320, "batch_invariant": True}
    adapter = TransformersModel(model)
    with pytest.raises(ConfigError, match=r"layer 'model\.layers\.0\.self_attn\.q_proj'"):
        engine_for(adapter, **sizes)
    pack_weights(model, batch_invariant=True)
    engine_for(adapter, **sizes).close()
