"""The page of counts is what the tool counts, and the counter sees what a device would do."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from device_counter import counting
from gpu_counts import PAGE, page, release

META = torch.device("meta")


def test_page_is_what_the_tool_writes():
    text = PAGE.read_text()
    if f"with torch {release()}," not in text:
        pytest.skip(f"torch {release()} makes other operations of the same calls")
    assert text == page(), "run `python tools/gpu_counts.py`"


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
