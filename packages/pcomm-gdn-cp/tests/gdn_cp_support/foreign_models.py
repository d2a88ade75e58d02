"""Models of transformers over ranks beside their own forward on one process."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, logging

from core_support.tiny_transformers import VOCABULARY, tiny_config, tiny_model
from pcomm.core.groups.group import Group
from pcomm.gdn_cp import ContextParallel, context_parallel

__all__ = ["KINDS", "compare", "compare_with_alone", "model_of", "packed", "rounding_errors"]

logging.set_verbosity_error()

# One for each mechanism: plain attention, a window and softcap, sinks, learned positions, scaled
# values, experts, multi-head latent attention, and the mixers.
KINDS = (
    "llama",
    "gemma2",
    "gpt_oss",
    "gpt2",
    "opt",
    "qwen3_moe",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5_text",
    "olmo_hybrid",
    "mamba2",
    "bamba",
    "falcon_h1",
    "zamba2",
    # Refused.
    "bloom",
    "lfm2",
    "roberta",
)


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny model whose weights are large and whose states decay slowly."""
    config = tiny_config(kind, decoder=True)
    cls = AutoModelForCausalLM._model_mapping[type(config)]
    model = tiny_model(cls, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-4, -1, generator=generator)
            elif name.endswith("dt_bias"):
                parameter.uniform_(-2, -1, generator=generator)
            elif parameter.dim() > 1:
                parameter.normal_(0, 0.15, generator=generator)
    return model.to(dtype)


def packed(lengths: Sequence[int]) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Tokens, labels with some that do not count, and offsets."""
    generator = torch.Generator().manual_seed(2)
    total = sum(lengths)
    tokens = torch.randint(4, VOCABULARY, (1, total), generator=generator)
    labels = tokens.masked_fill(torch.rand(1, total, generator=generator) < 0.2, -100)
    return tokens, labels, tuple(sum(lengths[:n]) for n in range(len(lengths) + 1))


def one_by_one(
    model: PreTrainedModel, tokens: Tensor, labels: Tensor, offsets: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Loss and logits of each sequence by itself, by the model's own forward; gradients stay."""
    cuts = list(pairwise(offsets))
    num_items = sum(int((labels[:, a + 1 : b] != -100).sum()) for a, b in cuts)
    losses, logits = [], []
    for first, last in cuts:
        output = model(input_ids=tokens[:, first:last], use_cache=False)
        logits.append(output.logits[0])
        losses.append(
            model.loss_function(
                logits=output.logits,
                labels=labels[:, first:last],
                vocab_size=model.config.get_text_config().vocab_size,
                num_items_in_batch=num_items,
            )
        )
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.detach(), torch.cat(logits).detach()


def worst_difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference of any tensor, as a part of its largest number."""
    apart = [
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-3))
        for a, b in zip(found, wanted, strict=True)
        if b.numel()
    ]
    return max(apart)


def compare(
    kind: str,
    group: Group,
    lengths: Sequence[int],
    *,
    is_packed: bool = True,
    is_checkpointed: bool = False,
    **options: Any,
) -> dict[str, float]:
    """How far loss, logits and gradients over ranks are from the model's own, in fp32.

    Args:
        kind: Family of the model.
        group: The ranks.
        lengths: Tokens of each sequence.
        is_packed: False for sequences of one length as rows.
        is_checkpointed: True for layers to be computed again in backward.
        options: Of `context_parallel`.
    """
    warnings.simplefilter("ignore")
    tokens, labels, offsets = packed(lengths)
    model = model_of(kind)
    wanted_loss, wanted_logits = one_by_one(model, tokens, labels, offsets)
    wanted = taken_gradients(model)
    if is_checkpointed:
        model.train()
        model.gradient_checkpointing_enable()
    cp = context_parallel(model, group, **options)
    batch = (tokens, labels) if is_packed else (x.view(len(lengths), -1) for x in (tokens, labels))
    ids, targets = batch
    cu_seqlens = offsets if is_packed else None
    with cp.batch(ids, labels=targets, cu_seqlens=cu_seqlens, verify=True) as local:
        output = model(**local)
        output.loss.backward()
    cp.sum_gradients()
    found = taken_gradients(model)
    own, wanted_own = own_rows(cp, output.logits[0].detach(), wanted_logits, offsets)
    return {
        "loss": worst_difference([output.loss.detach()], [wanted_loss]),
        "logits": worst_difference([own], [wanted_own]),
        "gradients": worst_difference([found[name] for name in wanted], [*wanted.values()]),
    }


def weighted_run(
    model: PreTrainedModel, group: Any, lengths: Sequence[int], **options: Any
) -> tuple[ContextParallel, Tensor, dict[str, Tensor]]:
    """This rank's logits, and all ranks' gradients of a sum of logits with weights."""
    warnings.simplefilter("ignore")
    tokens, _, offsets = packed(lengths)
    cp = context_parallel(model, group, **options)
    with cp.batch(tokens, cu_seqlens=offsets) as local:
        logits = model(**local).logits[0]
        weights = torch.linspace(-1, 1, logits.shape[1], dtype=logits.dtype)
        factors = 1 + torch.arange(tokens.shape[1], dtype=logits.dtype)[:, None] / 50
        own, by_token = own_rows(cp, logits, factors, offsets)
        (own * weights * by_token).sum().backward()
    cp.sum_gradients()
    return cp, logits.detach(), taken_gradients(model)


def compare_with_alone(
    kind: str, group: Group, lengths: Sequence[int], **options: Any
) -> tuple[float, float]:
    """How far logits and gradients over ranks are from those of the same on one rank, in fp64."""
    model = model_of(kind, torch.float64)
    alone, whole, wanted = weighted_run(model, (0, 1), lengths)
    cp, logits, found = weighted_run(model, group, lengths, **options)
    own = own_rows(cp, logits, whole, alone.plans[0].tokens.cu_seqlens)
    return worst_difference(*([x] for x in own)), worst_difference(
        [found[name] for name in wanted], [*wanted.values()]
    )


def rounding_errors(kind: str, group: Group, lengths: Sequence[int]) -> tuple[float, float]:
    """Errors of gradients in bf16 over ranks and on one process, against the same in fp32."""
    model = model_of(kind, torch.bfloat16)
    exact = model_of(kind, torch.bfloat16).float()
    _, _, wanted = weighted_run(exact, (0, 1), lengths)
    _, _, plain = weighted_run(model, (0, 1), lengths)
    _, _, ours = weighted_run(model, group, lengths)
    found, alone = (
        worst_difference([grads[name] for name in wanted], [*wanted.values()])
        for grads in (ours, plain)
    )
    return found, alone


def taken_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """The gradients of a model, which then has none."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def own_rows(
    cp: ContextParallel, own: Tensor, whole: Tensor, offsets: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """This rank's rows that are no padding, and the same of the whole batch."""
    tokens = cp.plans[0].tokens
    source = torch.full((tokens.num_tokens,), -1)
    for n, (first, last) in enumerate(pairwise(offsets)):
        place = tokens.cu_seqlens[n]
        source[place : place + last - first] = torch.arange(first, last)
    places = source[tokens.of_rank(cp.rank)]
    return own[places >= 0], whole[places[places >= 0]]
