"""All ranks in one launch on one GPU, against torch; and what a graph and one device can do."""

from __future__ import annotations

import pytest
import torch

from nvls_support.virtual_ranks import Operation, VirtualRanks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
KINDS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def wanted(operation: Operation, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What every rank gets; inputs are whole numbers, so that sums are exact."""
    total = torch.stack(xs).double().sum(0).to(xs[0].dtype)
    if operation == "all_gather":
        return [torch.cat(xs)] * len(xs)
    return list(total.chunk(len(xs))) if operation == "reduce_scatter" else [total] * len(xs)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_operations_back_to_back_equal_torch(size: int, kind: str) -> None:
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(size)
    ranks = VirtualRanks(size, 1 << 22, device=device)
    operations: list[Operation] = ["all_gather", "reduce_scatter", "one_shot", "two_shot"]
    for number in range(48):
        operation = operations[int(torch.randint(4, (), generator=generator))]
        length = size * 8 * int(torch.randint(1, 2000, (), generator=generator))
        xs = [
            torch.randint(-8, 9, (length,), generator=generator).to(device, KINDS[kind])
            for _ in range(size)
        ]
        expected = wanted(operation, xs)
        outs = [torch.full_like(one, 99) for one in expected]
        ranks.run(ranks.launch(operation, outs, xs))
        torch.cuda.synchronize()
        assert ranks.failure.item() == 0
        for out, one in zip(outs, expected, strict=True):
            assert torch.equal(out, one), (number, operation, length)
    ranks.close()


def test_a_captured_sequence_can_be_replayed() -> None:
    device = torch.device("cuda")
    ranks = VirtualRanks(4, 1 << 20, device=device)
    xs = [torch.zeros(4096, dtype=torch.bfloat16, device=device) for _ in range(4)]
    sums = [torch.empty_like(x) for x in xs]
    whole = [torch.empty(4 * 4096, dtype=torch.bfloat16, device=device) for _ in range(4)]
    # Two operations: a replay begins with the slot that the one before did not end with.
    launches = [ranks.launch("one_shot", sums, xs), ranks.launch("all_gather", whole, sums)]
    for launch in launches:
        ranks.run(launch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            ranks.run(launch)
    for step in range(5):
        for rank, x in enumerate(xs):
            x.fill_(step + rank)
        graph.replay()
        torch.cuda.synchronize()
        assert ranks.failure.item() == 0
        for one in whole:
            assert torch.equal(one, torch.full_like(one, 4 * step + 6))
    ranks.close()


def test_a_rank_that_is_missing_is_named() -> None:
    device = torch.device("cuda")
    ranks = VirtualRanks(3, 1 << 16, device=device, timeout_s=0.05)
    xs = [torch.zeros(1024, dtype=torch.bfloat16, device=device) for _ in range(3)]
    launch = ranks.launch("one_shot", [torch.empty_like(x) for x in xs], xs)
    # Only the ranks before the last one run.
    grid = (launch.num_blocks, 2)
    launch.kernel[grid](**launch.arguments, num_warps=launch.num_warps)
    torch.cuda.synchronize()
    assert ranks.failure.item() == 3


def test_the_norm_beside_a_copy_of_as_many_bytes() -> None:
    """Rows that are checked before they are timed; times are findings, not requirements."""
    from nvls_bench.on_one_gpu import norm_rows

    rows = list(norm_rows(torch.device("cuda"), rows=1024))
    print("\n".join(f"{row.case}: {row.value} {row.unit}" for row in rows))
    assert [row.unit for row in rows] == ["us", "us", "of the bound"]
    assert rows[1].ratio_to == rows[0].case


def test_whether_one_device_has_a_multicast_address(tmp_path: object) -> None:
    """A finding, not a requirement: it is printed, and must be an address or None."""
    from nvls_bench.on_one_gpu import multicast_of_one_device

    address, reason = multicast_of_one_device()
    print(f"one device: multicast address {address!r} ({reason})")
    assert address is None or address > 1 << 32
