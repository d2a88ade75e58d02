"""Bytes of a step, bandwidth and host times; nothing here is judged by a clock."""

import pytest
import torch

from pcomm.inference.engine.stats import HostTimes
from pcomm.inference.model import KVSpec, StateSpec
from pcomm.inference.roofline.decode_stats import MemoryBandwidth, measure_bandwidth
from pcomm.inference.roofline.step_bytes import KeptBytes, step_bytes, tensor_bytes

KIB, MIB = 2**10, 2**20
CPU = torch.device("cpu")


LLAMA = [KVSpec(heads=8, head_dim=128, dtype=torch.bfloat16)] * 32
QWEN = [StateSpec({"state": (32, 128, 128)}, {"state": torch.float32})] * 36


@pytest.mark.parametrize(
    ("specs", "weights", "requests", "kept", "new", "moved", "at_4_3_tb_per_s"),
    [
        # 8B in bf16 keep 128 KiB of a token, and take 3.73 ms, as is published.
        ([*LLAMA, None], 16_060_000_000, 2, 1024, 2, (1026 * 128 * KIB, 0), 3.77),
        # A batch of 256 takes 9.0 ms; each request has 144 MiB of states.
        (QWEN, 0, 256, 5 * 256, 256, (0, 256 * 144 * MIB), 9.0),
        # Chunks of prompts write as many keys as they have tokens.
        ([KVSpec(2, 8, torch.float32)], 0, 2, 10, 6, (16 * 2 * 2 * 8 * 4, 0), 0.0),
    ],
)
def test_bytes_of_a_step_are_those_of_its_layers(
    specs, weights, requests, kept, new, moved, at_4_3_tb_per_s
) -> None:
    found = step_bytes(
        KeptBytes.of(specs),
        weights=weights,
        num_requests=requests,
        kept_tokens=kept,
        new_tokens=new,
        num_logits=requests * 1000,
        logits_dtype=torch.bfloat16,
    )
    assert (found.keys_values, found.states) == moved
    assert found.logits == requests * 1000 * 2
    assert found.total == weights + sum(moved) + found.logits
    assert 1e3 * found.total / 4.3e12 == pytest.approx(at_4_3_tb_per_s, abs=0.05)
    halo = StateSpec({"a": (3, 10), "b": (7,)}, {"a": torch.bfloat16, "b": torch.float32})
    assert KeptBytes.of([halo, None]) == KeptBytes(per_token=0, per_request=60 + 28)


def test_tied_weights_count_once() -> None:
    weight = torch.zeros(10, 4)
    assert tensor_bytes([weight, weight.T, weight[2:], torch.zeros(3)]) == 160 + 12
    # Tensors that exist for a moment may get the same memory, one after the other.
    assert tensor_bytes(torch.zeros(100) for _ in range(10)) == 4000
    assert tensor_bytes([torch.zeros(5, device="meta"), torch.zeros(5, device="meta")]) == 40


def test_the_bandwidth_is_bytes_by_the_least_time() -> None:
    # Three ways of four measurements, the first of which does not count; a clock that is read twice
    # for each says that they took so many seconds.
    seconds = [0.1, 4, 2, 3, 0.1, 8, 1, 8, 0.1, 5, 5, 4]
    readings = iter([x for second in seconds for x in (0.0, second)])
    found = measure_bandwidth(2**20, CPU, repeats=3, clock=lambda: next(readings))
    assert found == MemoryBandwidth(copy=2**19, sum=2**20, matrix_vector=2**18)
    assert found.largest == 2**20
    assert next(readings, None) is None


def test_a_real_clock_gives_a_bandwidth() -> None:
    found = measure_bandwidth(2**14, CPU, repeats=1)
    assert min(found.copy, found.sum, found.matrix_vector) > 0


def test_host_times_are_medians_of_the_last_ones_of_each_phase() -> None:
    now = 0

    def clock() -> int:
        return now

    times = HostTimes(kept=3, clock=clock)
    assert times.medians_us() == {}
    for plan, model in [(90_000, 90_000), (1_000, 10_000), (3_000, 30_000), (2_000, 50_000)]:
        now += 777  # between steps, counted nowhere
        times.begin()
        now += plan
        times.lap("plan")
        now += model
        times.lap("model")
    assert times.medians_us() == {"plan": 2.0, "model": 30.0}
    assert list(times.medians_us()) == ["plan", "model"]
    assert times.step_ns == 52_000
