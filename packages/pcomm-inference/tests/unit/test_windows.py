"""Models in which every layer has a window run in fewer blocks than their texts have tokens for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig

from inference_support.toy_model import ToyModel, expected_tokens
from pcomm.core.errors import ConfigError
from pcomm.inference import Engine, Request, SamplingParams
from pcomm.inference.model import KVSpec, LayerMemory, Model, StepBatch
from pcomm.inference.roofline import BandwidthMeter
from pcomm.inference.roofline.decode_stats import MemoryBandwidth
from pcomm.inference.transformers import TransformersModel

SIZES: dict[str, Any] = {"max_model_len": 400, "block_size": 4, "num_state_slots": 4}
# Layers that see 6 and 7 tokens. A step has 8 new ones: 14 in a row are in at most 5 blocks.
TOY = ToyModel(attention_layers=2, state_layers=0, window=6)
FEWEST, NEW = 5, 8
PROMPT = [number * number % 11 for number in range(150)]


def engine_for(model: Model, vocabulary: int = 11, **settings: Any) -> Engine:
    return Engine(model, vocabulary=vocabulary, **SIZES | {"max_batch_tokens": NEW} | settings)


def request(name: str, prompt: list[int], most: int) -> Request:
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    return Request(name, tuple(prompt), params)


def written(engine: Engine, *requests: Request) -> tuple[dict[str, list[int]], int]:
    """Tokens of each request, and the most blocks that were used after a step."""
    found, most = {one.request_id: list[int]() for one in requests}, 0
    for one in requests:
        engine.add(one)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            found[output.request_id] += output.token_ids
        most = max(most, engine.stats().blocks.used)
    assert engine.stats().blocks.used == 0
    return found, most


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("speculative_tokens", [0, 3])
def test_a_long_text_needs_the_blocks_of_its_window(
    prefix_cache: bool, speculative_tokens: int
) -> None:
    settings = {"prefix_cache": prefix_cache, "speculative_tokens": speculative_tokens}
    engine = engine_for(TOY, num_blocks=FEWEST, **settings)
    found, most = written(engine, request("long", PROMPT, 100))
    assert found["long"] == expected_tokens(TOY, PROMPT, 100)
    assert most <= FEWEST < (len(PROMPT) + 100) // 4
    assert engine.stats().preemptions == 0


def test_a_pool_with_a_block_less_refuses_it() -> None:
    engine = engine_for(TOY, num_blocks=FEWEST - 1)
    with pytest.raises(ConfigError, match="need 5 KV blocks, and num_blocks is 4") as caught:
        engine.add(request("long", PROMPT, 100))
    assert "max_batch_tokens" in caught.value.fix
    # A short text has no more blocks than its tokens.
    assert len(written(engine, request("short", PROMPT[:9], 8))[0]["short"]) == 8
    smaller = engine_for(TOY, num_blocks=FEWEST - 1, max_batch_tokens=4)
    found, _ = written(smaller, request("long", PROMPT, 100))
    assert found["long"] == expected_tokens(TOY, PROMPT, 100)


@pytest.mark.parametrize("spec", [None, 50])
def test_one_layer_that_sees_more_keeps_the_blocks(spec: int | None) -> None:
    class Mixed(ToyModel):
        def memory_specs(self) -> Any:
            return [KVSpec(1, 1, torch.float64, window=spec), *super().memory_specs()[1:]]

    model = Mixed(attention_layers=2, state_layers=0, window=6)
    engine = engine_for(model, num_blocks=80)
    found, most = written(engine, request("long", PROMPT, 20))
    assert found["long"] == expected_tokens(TOY, PROMPT, 20)
    # All 168 tokens that were computed before the last step, or at most 57 in a row.
    assert most == 42 if spec is None else 13 <= most <= 15


def test_requests_beside_each_other_preempt_and_are_computed_again() -> None:
    engine = engine_for(TOY, num_blocks=8, max_requests=4)
    prompts = {str(n): PROMPT[7 * n :][: 30 + 11 * n] for n in range(4)}
    found, _ = written(engine, *(request(n, prompt, 40) for n, prompt in prompts.items()))
    assert found == {n: expected_tokens(TOY, prompt, 40) for n, prompt in prompts.items()}
    assert engine.stats().preemptions > 0


class FailsOnce(ToyModel):
    """Its step raises when it meets a position behind the first chunks."""

    failures: ClassVar[list[int]] = []

    def step(self, batch: StepBatch, memory: Sequence[LayerMemory | None]) -> Tensor:
        if not self.failures and batch.num_requests > 1 and int(batch.positions_T.max()) > 30:
            self.failures.append(1)
            raise RuntimeError("once")
        return super().step(batch, memory)


def test_requests_of_a_step_that_failed_run_alone_by_chunks_of_their_windows() -> None:
    engine = engine_for(FailsOnce(attention_layers=2, state_layers=0, window=6), num_blocks=12)
    prompts = {"short": PROMPT[:20], "long": PROMPT[:90]}
    found, _ = written(engine, *(request(n, prompt, 40) for n, prompt in prompts.items()))
    assert found == {n: expected_tokens(TOY, prompt, 40) for n, prompt in prompts.items()}
    assert FailsOnce.failures == [1]


def test_what_was_given_back_stays_in_the_prefix_cache_until_its_place_is_needed() -> None:
    engine = engine_for(TOY, num_blocks=60)
    written(engine, request("first", PROMPT, 4))
    # 153 computed tokens are 38 full blocks; a request that begins there holds those of its window.
    assert engine.stats().blocks.cached == 38
    longer = [*PROMPT, *expected_tokens(TOY, PROMPT, 3), 5]
    found, most = written(engine, request("second", longer, 30))
    assert found["second"] == expected_tokens(TOY, longer, 30)
    assert engine.stats().cached_tokens == 152
    assert most <= FEWEST
    other = [(token + 1) % 11 for token in PROMPT]
    assert written(engine, request("other", other, 80))[0]["other"] == expected_tokens(
        TOY, other, 80
    )
    # Gaps in the tree are no prefix.
    assert written(engine, request("again", longer, 9))[0]["again"] == expected_tokens(
        TOY, longer, 9
    )


def test_a_step_of_decoding_moves_the_keys_of_its_window() -> None:
    meter = BandwidthMeter(lambda *_: MemoryBandwidth(1e6, 1e6, 1e6))
    meter.bandwidth(torch.device("cpu"), 0)
    engine = engine_for(TOY, num_blocks=60, meter=meter, max_batch_tokens=200)
    engine.add(request("long", PROMPT, 5))
    engine.add(request("short", [1, 2, 3], 5))
    for _ in range(2):
        engine.step()
    decode = engine.stats().decode
    assert decode is not None
    # Of 150 and 3 tokens 5 and 3 are read by one layer, 6 and 3 by the other; both write two.
    assert decode.moved.keys_values == 16 * ((5 + 3 + 2) + (6 + 3 + 2))


KINDS = {"mistral": (MistralConfig, {}), "gemma2": (Gemma2Config, {"head_dim": 8})}


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_transformers_write_the_tokens_of_their_own_forward(kind: str) -> None:
    """Mistral, whose every layer has a window, in few blocks; Gemma 2 mixes them, and has caps."""
    make, more = KINDS[kind]
    torch.manual_seed(0)
    widths = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    widths |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 64}
    config = make(**widths, sliding_window=8, tie_word_embeddings=False, **more)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.6)
    texts = {"long": list(range(60)), "short": [5, 4, 3]}
    expected = {}
    for name, prompt in texts.items():
        tokens = list(prompt)
        for _ in range(30):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        expected[name] = tokens[len(prompt) :]
    assert len(set(expected["long"])) > 5
    adapter = TransformersModel(model)
    try:
        engine = engine_for(adapter, 64, num_blocks=40)
        found, most = written(engine, *(request(n, prompt, 30) for n, prompt in texts.items()))
    finally:
        adapter.close()
    assert found == expected
    # Of 89 and 32 tokens: all of them, or two windows with a chunk.
    assert most > 22 if kind == "gemma2" else most <= 2 * 5
