"""`pcomm bench fsdp`: what is refused, the checks before anything is timed, and memory."""

from __future__ import annotations

import argparse
import gc
import threading

import pytest
import torch

from fsdp_bench import measure as memory
from fsdp_bench.command import command
from fsdp_bench.measure import can_count, in_use_bytes, peak_bytes
from fsdp_bench.settings import MODELS, LinkRate, Settings, Widths, place_of
from fsdp_bench.trainings import BenchModel, Reference, squared_norm
from pcomm.core.collectives.protocol import Collectives
from pcomm.core.errors import ConfigError
from pcomm.core.testing.programs import PATIENCE_S, scaled_s, wait_until
from pcomm.core.testing.virtual import run_virtual

MEBI = 1 << 20


def settings(line: str) -> Settings:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    found: Settings = command.settings_of(parser.parse_args(line.split()))
    return found


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--ranks 1", "below 2 or above 16"),
        ("--models linear,conv", "unknown: conv"),
        ("--rounds 2", "fewer than 3 rounds"),
        ("--links 0.5", "a rate or a batch out of range"),
        ("--links 400x100", "a rate or a batch out of range"),
        ("--links 400,fast", "'fast', which is no rate with a batch"),
        ("--links 400,400x1", "one of them twice"),
        ("--forms fsdp2,FSDP2", "unknown: FSDP2"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(line: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        settings(line)
    assert str(caught.value).startswith("pcomm bench fsdp --")


def test_what_is_measured_is_what_was_asked_for() -> None:
    assert settings("") == Settings()
    found = settings("--ranks 3 --links 1000,50.5x2 --forms ours-2-groups,fsdp2 --rounds 4")
    assert (found.ranks, found.rounds) == ((3,), 4)
    assert found.links == (LinkRate(1000.0, 1), LinkRate(50.5, 2))
    # In the order of tables, whatever the order on the command line.
    assert [form.key for form in found.chosen_forms()] == ["fsdp2", "ours-2-groups"]
    assert found.widths("linear", LinkRate(1.0, 4)).rows == 4 * found.widths("linear").rows
    assert settings("--quick").is_small


def test_places_name_everything_but_the_first_link() -> None:
    assert place_of(2, "linear", LinkRate()) == "2 ranks, linear"
    assert place_of(4, "linear", LinkRate(2000.0, 4)) == "4 ranks, linear, 2 Gbit/s, batch x4"
    assert place_of(4, "linear", LinkRate(400.0, 2)) == "4 ranks, linear, 400 Mbit/s, batch x2"
    assert place_of(1, "linear", LinkRate()) == "1 rank, linear"


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_is_the_gradient_over_all_rows(name: str) -> None:
    problem = BenchModel(name, Widths(16, 2, 32))
    model = problem.build(torch.float64)
    batch = torch.cat([problem.batch(rank) for rank in range(3)]).double()
    problem.loss(model, batch).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}

    def run(collectives: Collectives) -> Reference:
        return Reference.of(problem, collectives)

    for reference in run_virtual(run, 3):
        for key, value in reference.exact.items():
            torch.testing.assert_close(value, expected[key])
        reference.check(reference.plain)
        for key, value in reference.plain.items():
            # One row of one parameter that was not summed is found.
            broken = dict(reference.plain)
            broken[key] = value.clone()
            broken[key][-1] = 0.0
            with pytest.raises(AssertionError, match=f"gradient of {key}"):
                reference.check(broken)


def test_parameters_are_those_of_the_reference_notes() -> None:
    problem = BenchModel("linear", Settings().widths("linear"))
    assert problem.unit_bytes() == [768 * 768 * 4] * 8
    assert float(squared_norm([torch.full((3,), 2.0), torch.ones(2, 2)])) == 16.0


@pytest.mark.skipif(not can_count(), reason="the C library does not tell what is in use")
def test_peak_memory_is_that_of_all_threads_and_of_the_fullest_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = [0]

    def look() -> int:
        looks[0] += 1
        return in_use_bytes()

    monkeypatch.setattr(memory, "in_use_bytes", look)

    def run() -> None:
        def fill() -> None:
            both = [torch.zeros(24 * MEBI), torch.zeros(8 * MEBI)]
            filled.set()
            seen.wait(PATIENCE_S)
            del both

        filled, seen = threading.Event(), threading.Event()
        other = threading.Thread(target=fill)
        other.start()
        assert filled.wait(scaled_s(PATIENCE_S))
        # One look may have begun before.
        enough = looks[0] + 2
        wait_until(lambda: looks[0] >= enough, "a look at what is in use")
        seen.set()
        other.join()

    # What other tests left behind should not go while this one counts; some MiB may.
    gc.collect()
    base = in_use_bytes()
    found = peak_bytes(run, base)
    # Two tensors of 96 and 32 MiB, which are there together.
    assert 112 * MEBI < found < 144 * MEBI
    assert in_use_bytes() - base < 16 * MEBI
