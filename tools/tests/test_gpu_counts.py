"""The page of counts is what the tool counts, and the counter sees what a device would do."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from device_counter import counting
from gpu_counts import PAGE, page, release
from pcomm.integration.forecast.dry_run import parameters_by_kind
from training_memory import FIRST, RUNS, Norm, Run, begin_of_row, kept_by_a_layer, moments, peak

META = torch.device("meta")


# A model alone, and one in shards; one computes its blocks again. The long form has both of both.
SHORT = (Run("1B", 1, False), Run("8B", 8, True))
SOME_RUNS = [pytest.param(run, marks=[pytest.mark.soak] * (run not in SHORT)) for run in RUNS]


@pytest.mark.parametrize("runs", [SHORT, pytest.param(RUNS, marks=pytest.mark.soak)], ids=len)
def test_page_is_what_the_tool_writes(runs):
    text = PAGE.read_text()
    if f"with torch {release()}," not in text:
        pytest.skip(f"torch {release()} makes other operations of the same calls")
    others = tuple(begin_of_row(run) for run in RUNS if run not in runs)
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(others)]
    assert "".join(lines) == page(runs), "run `python tools/gpu_counts.py`"


def half(*shape, **options):
    return torch.empty(*shape, dtype=torch.bfloat16, device=META, **options)


def test_views_are_free_and_each_operation_is_counted_with_its_bytes():
    x, w = half(8, 16), half(4, 16)
    with counting() as counted, torch.inference_mode():
        y = F.linear(x.view(2, 4, 16).flatten(0, 1), w)
        y[:2].add_(1)
        F.rms_norm(x, (16,), half(16), 1e-5)
    assert counted.launches == {"mm": 1, "add_": 1, "_fused_rms_norm": 1}
    # 2 bytes a number, and the norm leaves 4 for each row; two rows of 4 are read and written.
    numbers = (8 * 16 + 4 * 16 + 8 * 4) + 2 * 2 * 4 + (2 * 8 * 16 + 16)
    assert counted.num_bytes == 2 * numbers + 4 * 8
    assert (counted.waits, counted.uploads) == (0, 0)


def test_rows_that_are_looked_up_are_read_alone():
    table, ids = half(1000, 16), torch.empty(3, dtype=torch.int64, device=META)
    with counting() as counted:
        F.embedding(ids, table)
    assert counted.num_bytes == 2 * (3 * 16 * 2) + 3 * 8
    pool, rows = half(1000, 16), half(3, 16)
    with counting() as counted:
        pool.index_copy_(0, ids, rows)
    assert counted.num_bytes == 2 * (3 * 16 * 2) + 3 * 8


def test_waits_and_uploads_are_counted():
    x = half(4)
    with counting() as counted:
        assert x.tolist() == [0] * 4
        assert x.sum().item() == 0
        torch.tensor([1, 2]).to(META)
        torch.tensor([1.0, 2.0], device=META)
    assert (counted.waits, counted.uploads, counted.total) == (2, 2, 1)


def test_attention_is_one_launch_where_torch_has_one():
    q, k = half(1, 4, 8, 64, requires_grad=True), half(1, 4, 8, 64)
    with counting() as counted:
        mixed = F.scaled_dot_product_attention(q, k, k, is_causal=True)
        forward = counted.so_far()
        torch.autograd.grad(mixed, [q], torch.empty_like(mixed))
    assert mixed.shape == q.shape
    assert forward.launches == {"flash_attention": 1}
    assert (counted - forward).launches == {"flash_attention backward": 3}
    # With a mask, or in fp32, it is several.
    for wide, mask in ((q, half(8, 8)), (q.float(), None)):
        with counting() as counted:
            F.scaled_dot_product_attention(wide, wide, wide, mask)
        assert counted.total > 1


def test_an_optimizer_takes_so_many_pieces_at_a_launch():
    parameters = [nn.Parameter(torch.empty(n, device=META)) for n in (65_536 * 319, 65_537)]
    state = [[torch.empty_like(p) for p in parameters] for _ in range(3)]
    steps = [torch.empty((), device=META) for _ in parameters]
    with counting() as counted:
        torch._fused_adamw_(
            parameters, *state, [], steps, lr=1.0, beta1=0.9, beta2=0.9, weight_decay=0.0,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
    assert counted.launches == {"_fused_adamw_": 2}


@pytest.mark.parametrize("run", SOME_RUNS, ids=str)
def test_a_layer_adds_what_arithmetic_says(run):
    """Sizes of tensors by hand, without a count; as many bytes as are counted."""
    (few, few_after), (more, more_after) = (moments(run, FIRST + n) for n in (0, 1))
    assert more.activations - few.activations == kept_by_a_layer(run)
    assert more_after.activations == few_after.activations
    layer = sum(parameters_by_kind(run.config(2)).values())
    layer -= sum(parameters_by_kind(run.config(1)).values())
    # Shards are cut between rows, and an optimizer counts the steps of each parameter.
    assert 0 <= more.weights - few.weights - 4 * layer / run.ranks < 1e-3 * more.weights
    assert 0 <= more.optimizer - few.optimizer - 8 * layer / run.ranks < 1e-3 * more.optimizer


@pytest.mark.soak
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_whole_model_holds_what_two_small_ones_say(run):
    whole = max(moments(run, run.size.layers), key=lambda memory: memory.peak)
    assert whole == peak(run)


def test_a_norm_keeps_what_torch_keeps():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        Norm.apply(x, weight)
    y, of_rows = torch.ops.aten._fused_rms_norm(x, [8], weight, 1e-5)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    form = [(one.shape, one.dtype) for one in (x, weight, of_rows)]
    assert [(one.shape, one.dtype) for one in kept] == form
