"""Bytes of a step, bandwidth and host times; nothing here is judged by a clock."""

import pytest
import torch

from pcomm.inference.engine.stats import HostTimes
from pcomm.inference.model import KVSpec, StateSpec
from pcomm.inference.roofline.decode_stats import MemoryBandwidth, measure_bandwidth
from pcomm.inference.roofline.step_bytes import KeptBytes, step_bytes, tensor_bytes

KIB, MIB = 2**10, 2**20
CPU = torch.device("cpu")


def test_a_token_of_an_8b_llama_keeps_128_kib() -> None:
    specs = [KVSpec(heads=8, head_dim=128, dtype=torch.bfloat16)] * 32
    found = step_bytes(
        KeptBytes.of([*specs, None]),
        weights=16_060_000_000,
        num_requests=2,
        kept_tokens=1024,
        new_tokens=2,
        num_logits=2 * 128_256,
        logits_dtype=torch.bfloat16,
    )
    assert found.keys_values == (1024 + 2) * 128 * KIB
    assert found.states == 0
    assert found.logits == 2 * 128_256 * 2
    assert found.total == found.weights + found.keys_values + found.logits
    # 8B in bf16 at 4.3 TB/s are 3.73 ms, as is published.
    assert 1e3 * found.weights / 4.3e12 == pytest.approx(3.73, abs=0.01)


def test_a_request_of_a_qwen3_next_moves_144_mib_of_states() -> None:
    shapes, dtypes = {"state": (32, 128, 128)}, {"state": torch.float32}
    found = step_bytes(
        KeptBytes.of([StateSpec(shapes, dtypes)] * 36),
        weights=0,
        num_requests=256,
        kept_tokens=5 * 256,
        new_tokens=256,
        num_logits=0,
        logits_dtype=torch.float32,
    )
    assert found.states == 256 * 144 * MIB
    # A batch of 256 takes 9.0 ms at 4.3 TB/s.
    assert 1e3 * found.total / 4.3e12 == pytest.approx(9.0, abs=0.05)
    halo = StateSpec({"a": (3, 10), "b": (7,)}, {"a": torch.bfloat16, "b": torch.float32})
    assert KeptBytes.of([halo, None]) == KeptBytes(per_token=0, per_request=60 + 28)


def test_chunks_of_prompts_write_as_many_keys_as_they_have_tokens() -> None:
    found = step_bytes(
        KeptBytes.of([KVSpec(2, 8, torch.float32)]),
        weights=0,
        num_requests=2,
        kept_tokens=10,
        new_tokens=6,
        num_logits=0,
        logits_dtype=torch.float32,
    )
    assert found.keys_values == 16 * 2 * 2 * 8 * 4


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
