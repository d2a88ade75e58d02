"""Micro-batches that no memory has room for."""

from __future__ import annotations

import pytest
import torch

from pcomm.core.errors import ConfigError
from pcomm.integration import recipes
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Resolved
from pcomm.integration.config.toml import apply_overrides
from pcomm.integration.train.trainer import check_batch_memory, largest_memory


def config(ranks: int, *overrides: str) -> Resolved:
    sizes = ("model.width=32", "train.sequence_length=1024", "train.global_batch_tokens=8192")
    return validate(apply_overrides(recipes.tiny(), [*sizes, *overrides]), ranks)


@pytest.mark.parametrize(
    ("ranks", "overrides", "least"),
    [
        # Two ids of 8 bytes a token, and two hidden states of 32 numbers.
        (1, [], 8192 * (16 + 2 * 32 * 4)),
        (1, ["train.dtype=bf16"], 8192 * (16 + 2 * 32 * 2)),
        (1, ["train.micro_batch_tokens=2048"], 2048 * (16 + 2 * 32 * 4)),
        (2, [], 4096 * (16 + 2 * 32 * 4)),
        (2, ["parallel.cp=2"], 8192 * (16 + 32 * 4)),
        (2, ["parallel.tp=2"], 8192 * (16 + 2 * 32 * 4)),
        (2, ["parallel.tp=2", "parallel.sequence=true"], 8192 * (16 + 32 * 4)),
    ],
)
def test_what_is_larger_than_all_memory_is_refused(ranks, overrides, least):
    resolved = config(ranks, *overrides)
    check_batch_memory(resolved, least)
    with pytest.raises(ConfigError) as caught:
        check_batch_memory(resolved, least - 1)
    tokens = resolved.train.micro_batch_tokens
    assert caught.value.asked == "train.micro_batch_tokens"
    assert f"far below {tokens - 1}, to a multiple of" in caught.value.fix


def test_a_row_that_is_too_long_is_what_the_error_names():
    resolved = config(1)
    with pytest.raises(
        ConfigError, match=r"train\.sequence_length: 1024 tokens; 8192 at once"
    ) as e:
        check_batch_memory(resolved, 1023 * 272)
    assert "far below 1023" in e.value.fix


def test_the_memory_of_this_machine_is_some():
    assert largest_memory(torch.device("cpu")) > 2**28
