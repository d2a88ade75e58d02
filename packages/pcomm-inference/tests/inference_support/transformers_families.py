"""Causal language models of transformers in tiny form, beside their own forward."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from core_support.tiny_transformers import tiny_config, tiny_model
from pcomm.inference import Engine, Request, SamplingParams
from pcomm.inference.transformers import TransformersModel

FAMILIES: Mapping[str, str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
"""The class of each family that transformers calls a causal language model."""

# Windows of tiny models are 24 tokens.
PROMPTS = (1, 7, 16, 17, 40)
WRITTEN = 12
LONGEST = 128


def tiny_family(family: str, **config: Any) -> PreTrainedModel:
    """A random model whose tokens depend on what it reads."""
    cls = getattr(transformers, FAMILIES[family])
    chosen = tiny_config(family, decoder=True, **config)
    if not isinstance(chosen, cls.config_class):
        chosen = chosen.get_text_config(decoder=True)
    with torch.device("meta"):
        size = sum(param.numel() for param in cls(chosen).parameters())
    if size > 7_000_000:
        raise ValueError(f"{size} parameters")
    model = tiny_model(cls, chosen)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(std=0.15)
    return model


def prompts_for(lengths: Sequence[int] = PROMPTS, seed: int = 0) -> list[tuple[int, ...]]:
    """Random tokens beyond the special ones."""
    chance = random.Random(seed)
    return [tuple(chance.randrange(4, 100) for _ in range(length)) for length in lengths]


def own_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """`[T, V]` of one text, as its owner computes them."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits.double()


def engine_for(adapter: TransformersModel, **settings: Any) -> Engine:
    """An engine with small blocks, whose steps have few tokens."""
    sizes = {"block_size": 4, "num_blocks": 80, "num_state_slots": 8, "max_batch_tokens": 16}
    vocabulary = own_logits(adapter.model, (5, 6)).shape[1]
    sizes |= {"vocabulary": vocabulary, "max_model_len": LONGEST}
    return Engine(adapter, **sizes | settings)


def write(
    engine: Engine, prompts: Sequence[tuple[int, ...]]
) -> list[tuple[list[int], list[float]]]:
    """The tokens behind each prompt, all at once, and their log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=WRITTEN, ignore_eos=True, logprobs=0)
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), prompt, params))
    written: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    while engine.has_work:
        for output in engine.step():
            tokens, logprobs = written[int(output.request_id)]
            tokens += output.token_ids
            logprobs += [entry.logprob for entry in output.logprobs]
        if engine.step_error is not None:
            raise engine.step_error
    return written


def difference(
    model: PreTrainedModel,
    prompts: Sequence[tuple[int, ...]],
    written: Sequence[tuple[list[int], list[float]]],
) -> str | None:
    """Where the likeliest tokens by the model's own forward are others; None for nowhere.

    Two tokens that rounding makes likelier in turn count as equal.
    """
    for prompt, (tokens, logprobs) in zip(prompts, written, strict=True):
        if len(tokens) != WRITTEN:
            return f"{len(tokens)} tokens behind {len(prompt)}"
        whole = own_logits(model, (*prompt, *tokens[:-1]))[len(prompt) - 1 :]
        limit = 2e-4 * max(1.0, float(whole.abs().max()))
        # The first token has a forward of its own, of the prompt alone.
        if float((own_logits(model, prompt)[-1] - whole[0]).abs().max()) > limit:
            return "its own forward does not compute a token from those before it alone"
        likeliest = whole.max(1).values
        for number, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            behind = f"behind {len(prompt)} + {number} tokens"
            if float(likeliest[number] - whole[number, token]) > limit:
                return f"token {token} and not {int(whole[number].argmax())} {behind}"
            apart = abs(float(whole[number].log_softmax(0)[token]) - logprob)
            if apart > 2 * limit:
                return f"log-probabilities {apart:.3g} apart {behind}"
    return None
