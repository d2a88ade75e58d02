"""`pcomm bench fsdp`: what is refused, the checks before anything is timed, and memory."""

from __future__ import annotations

import argparse
import gc
import threading

import pytest
import torch

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.command.bench import options
from pcomm.core.command.main import main
from pcomm.core.testing import namespaces
from pcomm.core.testing.patience import PATIENCE_S, scaled_s, wait_until
from pcomm.core.testing.virtual import run_virtual
from pcomm.fsdp.bench import command, memory
from pcomm.fsdp.bench.memory import can_count, in_use_bytes, peak_bytes
from pcomm.fsdp.bench.models import Problem, Reference, squared_norm
from pcomm.fsdp.bench.settings import MODELS, Link, Settings, Widths, place_of

MEBI = 1 << 20


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ranks", "1"], "below 2 or above 16"),
        (["--ranks", "2;4"], "words that are no numbers"),
        (["--models", "linear,conv"], "unknown: conv"),
        (["--rounds", "2"], "fewer than 3 rounds"),
        (["--links", "0.5"], "a rate or a batch out of range"),
        (["--links", "400x100"], "a rate or a batch out of range"),
        (["--links", "400,fast"], "'fast', which is no rate with a batch"),
        (["--links", "400,400x1"], "one of them twice"),
        (["--forms", "fsdp2,FSDP2"], "unknown: FSDP2"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "fsdp", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: pcomm bench fsdp --")
    assert told in error


def test_without_root_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert main(["bench", "fsdp", "--quick"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("UnsupportedError: rated_network")
    assert "user 1000, not root" in error
    assert "iproute2" in error


def test_a_picture_without_matplotlib_is_refused_before_minutes_of_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    assert main(["bench", "fsdp", "--plot", "x.png"]) == 2
    assert "python3 -m pip install matplotlib" in capsys.readouterr().err


def test_what_is_measured_is_what_was_asked_for() -> None:
    parser = argparse.ArgumentParser()
    command.command.add_arguments(parser)

    def settings(line: str) -> Settings:
        return command.settings_of(parser.parse_args(line.split()))

    assert settings("") == Settings()
    found = settings("--ranks 3 --links 1000,50.5x2 --forms ours-2-groups,fsdp2 --rounds 4")
    assert (found.ranks, found.rounds) == ((3,), 4)
    assert found.links == (Link(1000.0, 1), Link(50.5, 2))
    # In the order of tables, whatever the order on the command line.
    assert [form.key for form in found.chosen_forms()] == ["fsdp2", "ours-2-groups"]
    assert found.widths("linear", Link(1.0, 4)).rows == 4 * found.widths("linear").rows
    assert settings("--quick").is_small


def test_places_name_everything_but_the_first_link() -> None:
    assert place_of(2, "linear", Link()) == "2 ranks, linear"
    assert place_of(4, "linear", Link(2000.0, 4)) == "4 ranks, linear, 2 Gbit/s, batch x4"
    assert place_of(4, "linear", Link(400.0, 2)) == "4 ranks, linear, 400 Mbit/s, batch x2"
    assert place_of(1, "linear", Link()) == "1 rank, linear"


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_is_the_gradient_over_all_rows(name: str) -> None:
    problem = Problem(name, Widths(16, 2, 32))
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
    problem = Problem("linear", Settings().widths("linear"))
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
