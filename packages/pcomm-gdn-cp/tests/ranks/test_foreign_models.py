"""Whole models of transformers over ranks: loss, logits and gradients as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from core_support.works_with import check_outcome, models, outcome
from gdn_cp_support.foreign_models import (
    KINDS,
    compare,
    compare_with_alone,
    model_of,
    own_rows,
    packed,
    rounding_errors,
)
from gdn_cp_support.planned_mixers import world
from pcomm.core.errors import ConfigError, LayoutError
from pcomm.core.groups.group import Group
from pcomm.core.testing.on_ranks import ranks
from pcomm.gdn_cp import context_parallel

# Sums of some hundred fp32 numbers in another order, through a few layers. A token, a state or a
# gradient that is lost changes the first or second digit.
BOUND = 1e-4
LENGTHS = (19, 8, 33)


def cp() -> Group:
    return Group.from_process_group("cp", world())


def check(kind: str, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> None:
    apart = compare(kind, cp(), lengths, **options)
    assert max(apart.values()) < BOUND, (kind, options, apart)


@pytest.mark.parametrize(
    "kind", models("pcomm-gdn-cp", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), KINDS)
)
@ranks(2)
def test_works_with_a_family_as_one_process_or_refuses_it(rank: int, kind: str) -> None:
    found = outcome(lambda: context_parallel(model_of(kind), cp()), lambda _: check(kind))
    if rank == 0:
        check_outcome("pcomm-gdn-cp", kind, found)


@ranks(2)
def test_every_strategy_computes_the_same(rank: int) -> None:
    """In fp64, but for decays, which transformers computes in fp32: so are their gradients."""
    for strategy, layout in (
        ("heads", "zigzag"),
        ("docs", "contiguous"),
        ("state", "zigzag"),
        ("gather", "contiguous"),
    ):
        for kind in ("olmo_hybrid", "bamba"):
            logits, gradients = compare_with_alone(
                kind, cp(), LENGTHS, strategy=strategy, layout=layout
            )
            assert logits < 1e-10, (kind, strategy)
            assert gradients < 1e-5, (kind, strategy)


@ranks(3)
def test_three_ranks(rank: int) -> None:
    """They divide no heads, so attention gathers, and one rank has no document."""
    check("qwen3_next", strategy="state")
    check("bamba", (24, 24), strategy="docs")
    check("gpt_oss", (7, 20), layout="contiguous")


@pytest.mark.soak
@ranks(4)
def test_four_ranks(rank: int) -> None:
    """More of them than key heads."""
    check("llama", strategy="heads")
    check("qwen3_5_text", (65,), strategy="state")
    check("falcon_h1", strategy="heads")


@ranks(2)
def test_rows_of_one_length_and_layers_that_are_computed_again(rank: int) -> None:
    check("olmo_hybrid", (20, 20, 20), is_packed=False)
    check("gemma2", (20, 20), is_packed=False, layout="contiguous")
    check("qwen3_next", is_checkpointed=True)


@ranks(2)
def test_rounding_to_bf16_is_that_of_one_process(rank: int) -> None:
    for kind in ("llama", "qwen3_next", "mamba2"):
        ours, alone = rounding_errors(kind, cp(), LENGTHS)
        # Half of each sum is rounded before it is added up, one rounding of bf16 more.
        assert ours <= 2 * alone + 2**-8, kind


def shifting(logits: Tensor, labels: Tensor, vocab_size: int = 0, **others: Any) -> Tensor:
    """A loss of one's own that takes labels which are not shifted."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def averaging(logits: Tensor, labels: Tensor, shift_labels: Any = None, **others: Any) -> Tensor:
    """A loss of one's own that divides by the labels that it sees."""
    if shift_labels is None:
        shift_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())


@ranks(2)
def test_a_loss_that_is_no_sum_over_its_labels_is_refused(rank: int) -> None:
    tokens, labels, offsets = packed(LENGTHS)
    for loss in (shifting, averaging):
        model = model_of("llama")
        model.loss_function = loss
        over_ranks = context_parallel(model, cp())
        with (
            pytest.raises(ConfigError, match="divided by num_items_in_batch"),
            over_ranks.batch(tokens, labels=labels, cu_seqlens=offsets),
        ):
            pass
        assert model.loss_function is loss


@ranks(2)
def test_layers_that_are_computed_again_after_their_batch_are_refused(rank: int) -> None:
    tokens, labels, offsets = packed(LENGTHS)
    for use_reentrant in (True, False):
        model = model_of("llama").train()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        over_ranks = context_parallel(model, cp())
        for _ in range(2):
            with over_ranks.batch(tokens, labels=labels, cu_seqlens=offsets) as local:
                output = model(**local)
                kept = model(**local)
                output.loss.backward()
        with pytest.raises(ConfigError, match="after their batch has ended"):
            kept.loss.backward()
        assert not model._forward_hooks


@ranks(2)
def test_positions_of_packed_sequences_without_their_offsets_are_refused(rank: int) -> None:
    """As transformers' collator makes them, whose jumps its masks look at."""
    tokens, _, offsets = packed(LENGTHS)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    model = model_of("llama")
    over_ranks = context_parallel(model, cp())
    wanted = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    for given in (tokens, tokens[0]):
        with (
            pytest.raises(LayoutError, match="0 at token 19, behind 18"),
            over_ranks.batch(given, position_ids=positions.reshape(given.shape)),
        ):
            pass
    with over_ranks.batch(tokens, position_ids=positions, cu_seqlens=offsets) as local:
        logits = model(**local).logits
    found, own = own_rows(over_ranks, logits[0], wanted[0], offsets)
    torch.testing.assert_close(found, own, rtol=BOUND, atol=BOUND)
