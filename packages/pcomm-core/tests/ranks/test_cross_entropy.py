"""Cross-entropy of split logits against torch's own of the whole ones, and what it sends."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core_support.dispatch_modes import NestedModes
from pcomm.core.collectives.identity import IdentityCollectives
from pcomm.core.collectives.instrumented import SpyCollectives
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import LayoutError, UnsupportedError
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel import vocabulary as cross_entropy
from pcomm.core.tensor_parallel.linear import ColumnParallelLinear
from pcomm.core.tensor_parallel.split import take_shard
from pcomm.core.tensor_parallel.vocabulary import vocabulary_parallel_cross_entropy
from pcomm.core.testing.assertions import assert_close
from pcomm.core.testing.on_ranks import default_collectives, ranks
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual

UNEVEN = {2: (4, 3), 3: (5, 0, 2), 4: (1, 3, 0, 2)}


def example(num_tokens: int, length: int, *, scale: float, seed: int) -> tuple[Tensor, ...]:
    """Logits, targets of which every third is ignored, and upstream gradients; not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    logits_TV = torch.randn(length, num_tokens, generator=generator).t() * scale
    targets_T = torch.randint(length, (num_tokens,), generator=generator)
    targets_T[::3] = -100
    return logits_TV, targets_T, torch.randn(2 * num_tokens, generator=generator)[::2]


def plain(logits_TV: Tensor, targets_T: Tensor, upstream_T: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the whole logits, in their dtype."""
    whole = logits_TV.detach().requires_grad_()
    loss_T = F.cross_entropy(whole, targets_T, reduction="none")
    return loss_T.detach(), torch.autograd.grad(loss_T, whole, upstream_T.to(loss_T.dtype))[0]


def check(
    collectives: Collectives,
    layout: Layout,
    *,
    num_tokens: int = 7,
    scale: float = 3,
    seed: int = 0,
) -> None:
    logits_TV, targets_T, upstream_T = example(num_tokens, layout.length, scale=scale, seed=seed)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        rounded_TV = logits_TV.to(dtype)
        own_Tv = take_shard(rounded_TV, layout, collectives.rank, dim=1).detach().requires_grad_()
        loss_T = vocabulary_parallel_cross_entropy(own_Tv, targets_T, layout, collectives)
        (gradient_Tv,) = torch.autograd.grad(loss_T, own_Tv, upstream_T.to(loss_T.dtype))
        assert gradient_Tv.dtype == dtype
        loss_T = loss_T.detach()
        assert not loss_T[targets_T == -100].any()
        assert not gradient_Tv[targets_T == -100].any()

        exact_T, whole_TV = plain(rounded_TV.double(), targets_T, upstream_T)
        exact_Tv = take_shard(whole_TV, layout, collectives.rank, dim=1)
        # A sum over the vocabulary, at least 1, then over ranks, and a few single operations. The
        # gradient is a probability, or one less, whatever the logits: the error of a shifted
        # logit -s is at most its rounding, and s exp(-s) is less than 1.
        terms = layout.length + collectives.size + 8
        loss, slope = (float(x.abs().max()) if num_tokens else 0.0 for x in (exact_T, upstream_T))
        assert_close(loss_T, exact_T, num_terms=terms, magnitude=loss + 1)
        assert_close(gradient_Tv, exact_Tv, num_terms=terms, magnitude=slope)


@pytest.mark.parametrize("scale", [3.0, 1e4])
@ranks(2)
def test_loss_and_gradient_equal_torchs_on_two_ranks(rank: int, scale: float) -> None:
    check(default_collectives(), Layout.uneven(UNEVEN[2]), scale=scale)


@pytest.mark.parametrize("scale", [3.0, 1e4])
@ranks(4)
def test_loss_and_gradient_equal_torchs_on_four_ranks(rank: int, scale: float) -> None:
    check(default_collectives(), Layout.uneven(UNEVEN[4]), scale=scale)


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
    num_tokens=st.integers(0, 6),
    scale=st.sampled_from([0.0, 0.1, 10.0, 1e4]),
    seed=st.integers(0, 1000),
    num_bytes=st.sampled_from([1, 50, 2**20]),
)
@settings(max_examples=100, deadline=None)
def test_loss_and_gradient_equal_torchs_however_the_logits_are_cut(
    sizes: list[int], num_tokens: int, scale: float, seed: int, num_bytes: int
) -> None:
    def on_rank(collectives: VirtualCollectives) -> None:
        layout = Layout.uneven(sizes)
        check(collectives, layout, num_tokens=num_tokens, scale=scale, seed=seed)

    with (
        mock.patch.object(cross_entropy, "_CPU_BYTES", num_bytes),
        mock.patch.object(cross_entropy, "_LEAST_ROWS", 1),
    ):
        run_virtual(on_rank, len(sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_up_to_a_mebibyte_of_logits_is_computed_at_once(dtype: torch.dtype) -> None:
    layout, alone = Layout.even(64, 1), IdentityCollectives()
    for num_tokens in (2**12, 2**12 + 1):
        logits_TV, targets_T, upstream_T = example(num_tokens, 64, scale=3, seed=0)
        logits_TV = logits_TV.to(dtype).requires_grad_()
        loss_T = vocabulary_parallel_cross_entropy(logits_TV, targets_T, layout, alone)
        assert ("_CrossEntropy" in type(loss_T.grad_fn).__name__) is (num_tokens > 2**12)
        (found_TV,) = torch.autograd.grad(loss_T, logits_TV, upstream_T)
        exact_T, exact_TV = plain(logits_TV.double(), targets_T, upstream_T)
        slope = float(upstream_T.abs().max())
        assert_close(loss_T.detach(), exact_T, num_terms=72, magnitude=float(exact_T.max()) + 1)
        assert_close(found_TV, exact_TV, num_terms=72, magnitude=slope)


@pytest.mark.parametrize(("length", "rows"), [(2**13, 32), (2**14, 16), (2**15, 16)])
def test_sixteen_tokens_are_computed_at_once_however_long_the_vocabulary(
    length: int, rows: int
) -> None:
    logits_TV = torch.zeros(2 * rows, length, dtype=torch.bfloat16)
    targets_T = torch.zeros(2 * rows, dtype=torch.int64)
    with Largest() as found:
        vocabulary_parallel_cross_entropy(
            logits_TV, targets_T, Layout.even(length, 1), IdentityCollectives()
        )
    assert found.most[torch.float32] == 4 * rows * length


class Largest(TorchDispatchMode):
    """The most bytes of a tensor in fp32 that an operation makes, and of one in bf16."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = dict.fromkeys((torch.float32, torch.bfloat16), 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.dtype in self.most:
                size = one.untyped_storage().nbytes()
                self.most[one.dtype] = max(self.most[one.dtype], size)
        return result


@pytest.mark.parametrize(("device", "num_bytes"), [("cpu", 2**20), ("meta", 2**27)])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_chunk_of_the_logits_is_wide_at_once(
    device: str, num_bytes: int, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_own = 2**17 // num_ranks if device == "meta" else 2**10
    rows = num_bytes // (4 * num_own)
    # Values of targets are not compared where there are none.
    monkeypatch.setattr(cross_entropy, "check_ids", lambda *_, **__: None)

    nested = NestedModes(num_ranks)

    def on_rank(collectives: Collectives) -> None:
        found = Largest()
        logits_Tv = torch.zeros(
            4 * rows, num_own, dtype=torch.bfloat16, device=device, requires_grad=True
        )
        targets_T = torch.zeros(4 * rows, dtype=torch.int64, device=device)
        layout = Layout.even(num_own * num_ranks, num_ranks)
        single_thread = torch.autograd.set_multithreading_enabled(False)
        with nested(collectives.rank, found), single_thread:
            loss_T = vocabulary_parallel_cross_entropy(logits_Tv, targets_T, layout, collectives)
            torch.autograd.grad(loss_T, logits_Tv, torch.ones_like(loss_T))
        assert found.most == {torch.float32: num_bytes, torch.bfloat16: 2 * logits_Tv.numel()}

    if num_ranks == 1:
        on_rank(IdentityCollectives())
    else:
        run_virtual(on_rank, num_ranks)


def test_a_rank_of_impossible_words_adds_nothing() -> None:
    logits_TV = torch.tensor([[1.0, 2.0, -torch.inf, -torch.inf]])
    expected_T = F.cross_entropy(logits_TV, torch.tensor([1]), reduction="none")

    def on_rank(collectives: VirtualCollectives) -> None:
        layout = Layout.even(4, 2)
        own_Tv = take_shard(logits_TV, layout, collectives.rank, dim=1)
        loss_T = vocabulary_parallel_cross_entropy(own_Tv, torch.tensor([1]), layout, collectives)
        assert_close(loss_T, expected_T, num_terms=8)

    run_virtual(on_rank, 2)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@ranks(2)
def test_head_and_loss_never_gather_the_logits(rank: int, sequence_parallel: bool) -> None:
    """64 tokens and 100 columns: what is sent is counted in tokens and widths."""
    num_tokens, length, width = 64, 100, 8
    layout, spy = Layout.even(length, 2), SpyCollectives(default_collectives())
    head = ColumnParallelLinear(
        width, layout, spy, sequence_parallel=sequence_parallel, dtype=torch.float32
    )
    x_TD = torch.randn(num_tokens // (2 if sequence_parallel else 1), width, requires_grad=True)
    logits_Tv = head(x_TD)
    spy.clear()
    targets_T = torch.arange(num_tokens)
    loss_T = vocabulary_parallel_cross_entropy(logits_Tv, targets_T, layout, spy)
    assert [call.operation for call in spy.calls] == ["all_reduce", "all_reduce"]
    assert [call.input_bytes for call in spy.calls] == [4 * num_tokens, 8 * num_tokens]
    spy.clear()
    loss_T.mean().backward()
    (last,) = spy.calls
    assert last.operation == ("reduce_scatter" if sequence_parallel else "all_reduce")
    assert last.input_shape == (num_tokens, width)


def test_a_small_loss_of_large_logits_keeps_its_digits() -> None:
    logits_TV = torch.tensor([[1e4, 1e4 - 8, 0.0, -1e4]])

    def on_rank(collectives: VirtualCollectives) -> None:
        layout = Layout.even(4, 2)
        own_Tv = take_shard(logits_TV, layout, collectives.rank, dim=1)
        loss_T = vocabulary_parallel_cross_entropy(own_Tv, torch.tensor([0]), layout, collectives)
        # log(1 + exp(-8)): one addition to 1 is rounded, and the logarithm.
        exact_T = torch.tensor([-8.0]).double().exp().log1p()
        assert_close(loss_T, exact_T, num_terms=2, magnitude=1.0)

    run_virtual(on_rank, 2)


def test_an_ignored_target_may_be_an_id_of_the_vocabulary() -> None:
    logits_TV = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    targets_T = torch.tensor([0, 3, 5, 0])
    expected_T = F.cross_entropy(logits_TV, targets_T, reduction="none", ignore_index=0)

    def on_rank(collectives: VirtualCollectives) -> None:
        layout = Layout.even(6, 2)
        own_Tv = take_shard(logits_TV, layout, collectives.rank, dim=1)
        loss_T = vocabulary_parallel_cross_entropy(
            own_Tv, targets_T, layout, collectives, ignore_index=0
        )
        assert_close(loss_T, expected_T, num_terms=12)

    run_virtual(on_rank, 2)


def own_largest(
    self: VirtualCollectives, x: Tensor, *, op: str = "sum", out: None = None
) -> Tensor:
    """An all-reduce that leaves out the maximum."""
    stacked = torch.stack(self._all(x))
    return x.clone() if op == "max" else stacked.sum(0)


def doubled(self: VirtualCollectives, x: Tensor, *, op: str = "sum", out: None = None) -> Tensor:
    """An all-reduce that counts one rank twice."""
    stacked = torch.stack(self._all(x))
    return stacked.amax(0) if op == "max" else stacked.sum(0) + stacked[0]


BREAKS = {
    "target one too far": (cross_entropy, "first_position", lambda layout, rank: 1 + rank * 4),
    "every rank's own largest": (VirtualCollectives, "all_reduce", own_largest),
    "one rank counted twice": (VirtualCollectives, "all_reduce", doubled),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_loss_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BREAKS[name])
    with pytest.raises(AssertionError, match="worst element"):
        run_virtual(lambda collectives: check(collectives, Layout.uneven([4, 3])), 2)


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    def on_rank(collectives: VirtualCollectives) -> None:
        logits_Tv = torch.zeros(1, 2, requires_grad=True)
        loss_T = vocabulary_parallel_cross_entropy(
            logits_Tv, torch.tensor([1]), Layout.even(4, 2), collectives
        )
        with pytest.raises(UnsupportedError, match="create_graph"):
            torch.autograd.grad(loss_T, logits_Tv, torch.ones(1), create_graph=True)

    run_virtual(on_rank, 2)


@pytest.mark.parametrize(
    ("columns", "target", "layout", "words"),
    [
        (4, 1, Layout.even(4, 2), "a share of 2 columns"),
        (2, 4, Layout.even(4, 2), "ids 4 to 4"),
        (2, -1, Layout.even(4, 2), "ids -1 to -1"),
        (2, 1, Layout.sections([Layout.even(2, 2)] * 2), "not lie one after another"),
        (2, 1, Layout.even(6, 3), "a layout over 3 ranks"),
    ],
)
def test_mistakes_are_refused_on_every_rank(
    columns: int, target: int, layout: Layout, words: str
) -> None:
    def on_rank(collectives: VirtualCollectives) -> None:
        with pytest.raises(LayoutError, match=words):
            vocabulary_parallel_cross_entropy(
                torch.zeros(1, columns), torch.tensor([target]), layout, collectives
            )

    run_virtual(on_rank, 2)


def test_on_one_rank_it_is_torchs_own() -> None:
    logits_TV = torch.randn(5, 7).bfloat16()
    targets_T = torch.tensor([0, 6, -100, 3, 3])
    loss_T = vocabulary_parallel_cross_entropy(
        logits_TV, targets_T, Layout.even(7, 1), IdentityCollectives()
    )
    expected_T = F.cross_entropy(logits_TV.float(), targets_T, reduction="none")
    torch.testing.assert_close(loss_T, expected_T, rtol=0, atol=0)
