"""Models of transformers, unchanged, in the engine: their attention is looked up by a name."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from pcomm.inference import (
    Engine,
    KVMemory,
    KVSpec,
    LayerMemory,
    Request,
    SamplingParams,
    StepBatch,
    paged_attention,
)

VOCABULARY = 97
CONTEXT = 96
PROMPTS = (1, 7, 16, 17, 40)
WRITTEN = 12
NAME = "paged_by_pcomm"


class Adapter:
    """What the engine asks of a model, answered by one of transformers."""

    def __init__(self, model: PreTrainedModel, key_heads: int, head_dim: int) -> None:
        self.model, self.layers = model, model.config.num_hidden_layers
        self.spec = KVSpec(heads=key_heads, head_dim=head_dim, dtype=torch.float32)
        model.set_attn_implementation(NAME)

    def memory_specs(self) -> Sequence[KVSpec]:
        return [self.spec] * self.layers

    def step(self, batch: StepBatch, memory: Sequence[LayerMemory | None]) -> Tensor:
        found = self.model(
            input_ids=batch.tokens_T[None],
            position_ids=batch.positions_T[None],
            use_cache=False,
            logits_to_keep=batch.logits_rows,
            step=(batch, memory),
        )
        logits: Tensor = found.logits[0]
        return logits


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *unused: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    batch, memory = kwargs["step"]
    pools = memory[module.layer_idx]
    assert isinstance(pools, KVMemory)
    q_THK, k_TGK, v_TGK = (x[0].transpose(0, 1) for x in (query, key, value))
    found = paged_attention(q_THK, k_TGK, v_TGK, pools, batch, scale=kwargs.get("scaling"))
    return found[None], None


@pytest.fixture(autouse=True, scope="module")
def interface() -> Iterator[None]:
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *arguments, **kwargs: None)
    yield
    AttentionInterface._global_mapping.pop(NAME)
    AttentionMaskInterface._global_mapping.pop(NAME)


def families() -> Iterator[tuple[PreTrainedModel, int, int]]:
    """A model, its key heads and their width: grouped heads, learned positions, experts."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    rest = {"intermediate_size": 64, "max_position_embeddings": CONTEXT}
    yield LlamaForCausalLM(LlamaConfig(**sizes, **heads, **rest)), 2, 8
    gpt2 = GPT2Config(vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=6, n_positions=CONTEXT)
    yield GPT2LMHeadModel(gpt2), 6, 8
    experts = {"num_local_experts": 4, "sliding_window": None}
    yield MixtralForCausalLM(MixtralConfig(**sizes, **heads, **rest, **experts)), 2, 8


def expected(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    """The likeliest tokens by the model's own forward, computed anew for each."""
    tokens = list(prompt)
    for _ in range(WRITTEN):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        likeliest = logits.topk(2)
        # The two would differ by rounding alone where tokens are as good as equally likely.
        assert likeliest.values[0] - likeliest.values[1] > 1e-4
        tokens.append(int(likeliest.indices[0]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("number", range(3), ids=["llama", "gpt2", "mixtral"])
def test_tokens_are_those_of_the_models_own_forward(number: int) -> None:
    torch.manual_seed(number)
    model, key_heads, head_dim = list(families())[number]
    model.eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(std=0.15)
    chance = random.Random(number)
    prompts = [tuple(chance.randrange(VOCABULARY) for _ in range(length)) for length in PROMPTS]
    with torch.inference_mode():
        wanted = [expected(model, prompt) for prompt in prompts]
        assert len({tuple(tokens) for tokens in wanted}) == len(prompts)
        engine = Engine(
            Adapter(model, key_heads, head_dim),
            vocabulary=VOCABULARY,
            max_model_len=CONTEXT,
            block_size=4,
            num_blocks=40,
            num_state_slots=1,
            max_batch_tokens=16,
        )
        params = SamplingParams(temperature=0.0, max_tokens=WRITTEN, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            engine.add(Request(str(index), prompt, params))
        written: list[list[int]] = [[] for _ in prompts]
        while engine.has_work:
            for output in engine.step():
                written[int(output.request_id)] += output.token_ids
            assert engine.step_error is None
        engine.close()
    assert written == wanted
