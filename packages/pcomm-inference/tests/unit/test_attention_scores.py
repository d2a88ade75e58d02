"""Windows, caps, sinks, slopes and other widths of values, against dense softmax in fp64."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from inference_support.paged_tokens import Pool, Tokens, in_chunks, random_cuts
from inference_support.score_cases import CASES, LENGTHS, SINKS, G, H, assert_right, made
from pcomm.core.errors import ConfigError
from pcomm.core.testing.assertions import assert_equal
from pcomm.inference.attention.on_device import decode_by_copies
from pcomm.inference.attention.plan import MOST_ADDED, plan_of
from pcomm.inference.model import KVMemory, StepBatch


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_each_token_gets_what_the_formula_says(case: str, dtype: torch.dtype) -> None:
    """Chunks and single tokens side by side, in any order, on blocks of one and of 16 tokens."""
    for block_size in (1, 16):
        pool, requests, options = made(CASES[case], dtype, block_size)
        chance = random.Random(len(case))
        found = [list[Tensor]() for _ in requests]
        waiting = [random_cuts(len(one.q), chance) for one in requests]
        while any(waiting):
            chosen = [i for i, cuts in enumerate(waiting) if cuts]
            chance.shuffle(chosen)
            rows = pool.step([(requests[i], waiting[i].pop(0)) for i in chosen], **options)
            for i, own in zip(chosen, rows, strict=True):
                found[i].append(own)
        for one, own_rows in zip(requests, found, strict=True):
            assert_right(torch.cat(own_rows), one, options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_decoding_with_tensors_of_the_device_alone(case: str, dtype: torch.dtype) -> None:
    for block_size in (1, 16):
        pool, requests, options = made(CASES[case], dtype, block_size, LENGTHS[1:])
        for one in requests:
            pool.step([(one, len(one.q) - 1)], **options)
            # The rest of a block is not zero where nothing clears it.
            for blocks in pool.memory.by_token:
                of_request = torch.tensor(one.blocks) * block_size
                slots = (of_request[:, None] + torch.arange(block_size)).flatten()
                blocks[slots[one.done :]] = torch.nan
        found = pool.decode_by_copies(requests, **options)
        assert found.is_contiguous()
        for one, row in zip(requests, found, strict=True):
            assert_right(row[None], one, options)


def test_decoding_on_a_device_with_all_asks_for_no_number_of_a_tensor() -> None:
    pool, requests, options = made(CASES["all"], torch.float32, 16, (2, 60))
    for one in requests:
        pool.step([(one, len(one.q) - 1)], **options)
    batch = pool.batch([(one, 1) for one in requests])
    window = options.pop("window")
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:

        def faked(value: Any) -> Any:
            return mode.from_tensor(value) if isinstance(value, Tensor) else value

        without = StepBatch(**{name: faked(value) for name, value in vars(batch).items()})
        memory = KVMemory(*map(faked, (pool.memory.keys, pool.memory.values)))
        softmax = _softmax({name: faked(value) for name, value in options.items()})
        rows = decode_by_copies(
            torch.empty(2, H, 16),
            memory,
            without.block_tables_NB,
            without.context_lens_N,
            softmax,
            window,
        )
    assert rows.shape == (2, H, 8)


def _softmax(options: dict[str, Any]) -> Any:
    from pcomm.inference.attention.scores import Softmax

    return Softmax(**options)


# Each change of scores with one of both dtypes, and all of them with both.
ALONE = [(torch.float32, "window 17"), (torch.float32, "softcap"), (torch.float32, "slopes")]
ALONE += [(torch.bfloat16, "window 100"), (torch.bfloat16, "sinks")]
ALONE += [(torch.float32, "all"), (torch.bfloat16, "all")]
ALONE_LONG = [
    pytest.param(*pair, marks=pytest.mark.soak)
    for pair in product((torch.float32, torch.bfloat16), sorted({case for _, case in ALONE}))
    if pair not in ALONE
]


@pytest.mark.parametrize(("dtype", "case"), [*ALONE, *ALONE_LONG], ids=str)
def test_the_bits_of_a_row_do_not_depend_on_the_batch(case: str, dtype: torch.dtype) -> None:
    lengths = (*LENGTHS, 60, 61, 62, 63)

    def rows(chosen: list[int], news: list[int]) -> list[Tensor]:
        pool, requests, options = made(CASES[case], dtype, 16, lengths)
        requests = [requests[i] for i in chosen]
        for one, new in zip(requests, news, strict=True):
            if len(one.q) > new:
                pool.step([(one, len(one.q) - new)], **options)
        return pool.step(list(zip(requests, news, strict=True)), **options)

    for news in ([1] * len(lengths), [1 + i % 3 % length for i, length in enumerate(lengths)]):
        for i, own in enumerate(rows(list(range(len(lengths))), news)):
            assert_equal(own, rows([i], [news[i]])[0])


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("window", [1, 20, 100])
def test_blocks_before_the_window_are_not_read(window: int, block_size: int) -> None:
    """They may hold anything: NaN in them reaches no row, and the tables need not name them."""
    options: dict[str, Any] = {"window": window}
    pool, (tokens,), _ = made({}, torch.float64, block_size, (500,))
    rows, cuts = list[Tensor](), [150, 1, 1, 120, 3, 224, 1]
    for done, stop in pairwise([0, *torch.tensor(cuts).cumsum(0).tolist()]):
        gone = max(0, done + 1 - window) // block_size
        for blocks in (pool.memory.keys, pool.memory.values):
            blocks[tokens.blocks[:gone]] = torch.nan
        tokens.blocks[:gone] = [0] * gone
        rows += pool.step([(tokens, stop - done)], **options)
    assert_right(torch.cat(rows), tokens, options)


def test_a_decode_reads_as_many_keys_in_a_long_text_as_in_a_short_one() -> None:
    window, size = 64, 16
    for total in (400, 4000):
        pool = Pool((H, G), torch.float32, size, total + size)
        tokens = Tokens(total, (H, G), torch.float32, 0)
        # Only tables count here: nothing was computed.
        tokens.done = total - 1
        batch = pool.batch([(tokens, 1)])
        (call,) = plan_of(batch, pool.memory, tokens.q, window).decode_calls
        assert call.indices.num_keys <= window + size + MOST_ADDED
        assert len(set(call.indices.blocks.flatten().tolist())) <= window // size + 1
        # A chunk reads those of its first token's window up to its last one.
        tokens.done = total - 100
        plan = plan_of(
            replace(pool.batch([(tokens, 100)]), prepared={}), pool.memory, tokens.q, window
        )
        (chunk,) = plan.chunks
        assert chunk.indices.num_keys <= 100 + window + size + MOST_ADDED
        assert plan.causal_mask is not None
        assert plan.causal_mask.mask.shape[1] <= 2 * 100 + window + size + MOST_ADDED


def transformers_rows(kind: str, tokens: Tokens, window: int, options: dict[str, Any]) -> Tensor:
    """What the eager function of a model in transformers gives, with the mask of its library."""
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.gpt_oss import modeling_gpt_oss

    q, k, v = (x.double().transpose(0, 1)[None] for x in (tokens.q, tokens.k, tokens.v))
    module: Any = SimpleNamespace(num_key_value_groups=H // G, head_dim=16, training=False)
    i, j = torch.arange(len(tokens.q))[:, None], torch.arange(len(tokens.q))
    mask = torch.zeros(len(i), len(i), dtype=torch.float64)
    mask = mask.masked_fill_((j > i) | (j <= i - window), torch.finfo(torch.float64).min)
    if kind == "gemma2":
        rows, _ = modeling_gemma2.eager_attention_forward(
            module, q, k, v, mask, scaling=options["scale"], softcap=options["softcap"]
        )
    else:
        module.sinks = nn.Parameter(options["sinks_H"])
        rows, _ = modeling_gpt_oss.eager_attention_forward(
            module, q, k, v, mask, scaling=options["scale"]
        )
    found: Tensor = rows.detach()[0]
    return found


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_numbers_are_those_of_models_of_transformers(kind: str) -> None:
    options: dict[str, Any] = {"scale": 0.3}
    options |= {"softcap": 1.5} if kind == "gemma2" else {"sinks_H": SINKS[:5].repeat(2)[:H]}
    tokens, window = Tokens(150, (H, G), torch.float64, 3), 40
    pool = Pool((H, G), torch.float64, 16)
    rows = in_chunks(tokens, pool, [90, 1, 1, 55, 3], window=window, **options)
    # The softmax of gemma2 is in fp32.
    exact = transformers_rows(kind, tokens, window, options)
    limit = {"rtol": 0.0, "atol": 1e-6 if kind == "gemma2" else 1e-13}
    torch.testing.assert_close(rows, exact, **limit)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"window": 0}, "window=0"),
        ({"window": 2.5}, "window=0"),
        ({"window": True}, "window=0"),
        ({"softcap": 0.0}, "softcap=0.0"),
        ({"softcap": -3.0}, "softcap=-3.0"),
        ({"sinks_H": torch.zeros(G)}, r"sinks_H of shape \(2,\)"),
        ({"alibi_H": torch.zeros(2 * H)}, r"alibi_H of shape \(12,\)"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(options: dict[str, Any], found: str) -> None:
    pool, (tokens,), _ = made({}, torch.float32, 16, (4,))
    with pytest.raises(ConfigError, match=found) as caught:
        pool.step([(tokens, 4)], **options)
    assert caught.value.fix
    assert pool.memory.keys.isnan().all()


@pytest.mark.parametrize("window", [None, 21])
def test_a_window_longer_than_the_declared_one_is_refused(window: int | None) -> None:
    pool, (tokens,), _ = made({}, torch.float32, 16, (4,))
    pool.memory = replace(pool.memory, window=20)
    with pytest.raises(ConfigError, match=f"window={window}: a layer whose KVSpec has window=20"):
        pool.step([(tokens, 4)], window=window)
    pool.step([(tokens, 4)], window=20)
