"""The learning rate of each step, and what a run that is made longer does with it."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import get_scheduler

from integration_support.short_runs import prepare_words, tiny_config
from pcomm.core.errors import ConfigError
from pcomm.integration.checkpoint.folders import Checkpoint
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, TrainConfig
from pcomm.integration.data.preparation import open_prepared
from pcomm.integration.train.loop import describe_run
from pcomm.integration.train.run_state import Progress, Rewarm, learning_rate, learning_rates

COSINE = TrainConfig(steps=100, warmup_steps=10, learning_rate=1.0, min_learning_rate_ratio=0.1)
CONSTANT = TrainConfig(steps=100, warmup_steps=10, learning_rate=1.0, schedule="constant")


def changed(config: TrainConfig, **values: object) -> TrainConfig:
    return TrainConfig(**{**vars(config), **values})


def rates(config: TrainConfig, rewarm: Rewarm | None = None) -> list[float]:
    return [learning_rate(config, step, rewarm) for step in range(config.steps)]


def test_a_cosine_rises_falls_and_ends_at_its_minimum():
    found = rates(COSINE)
    assert found[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert found[9:] == sorted(found[9:], reverse=True)
    assert found[54] == pytest.approx(0.55)
    assert found[-1] == pytest.approx(0.1)
    assert learning_rate(COSINE, 1000) == pytest.approx(0.1)


def hugging_face(kind: str, config: TrainConfig, **options: float | str) -> list[float]:
    """Rates that transformers gives, whose step counts from 1 where ours counts from 0."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    found = get_scheduler(
        kind,
        optimizer,
        num_warmup_steps=config.warmup_steps,
        num_training_steps=config.steps,
        scheduler_specific_kwargs=options or None,
    )
    (rate,) = found.lr_lambdas
    return [config.learning_rate * rate(step + 1) for step in range(config.steps)]


@pytest.mark.parametrize(("steps", "warmup"), [(100, 10), (7, 0), (50, 49)])
@pytest.mark.parametrize("ratio", [0.0, 0.25])
def test_schedules_are_those_of_transformers(steps, warmup, ratio):
    base = changed(
        COSINE, steps=steps, warmup_steps=warmup, learning_rate=0.3, min_learning_rate_ratio=ratio
    )
    cosine = hugging_face("cosine_with_min_lr", base, min_lr_rate=ratio)
    assert rates(base) == pytest.approx(cosine)
    constant = hugging_face("constant_with_warmup", base)
    assert rates(changed(base, schedule="constant")) == pytest.approx(constant)
    if ratio == 0:
        line = hugging_face("linear", base)
        assert rates(changed(base, schedule="linear")) == pytest.approx(line, abs=1e-12)
    for decay in {1, 3, steps - warmup} - {0}:
        if warmup + decay > steps:
            continue
        for ours, theirs in (("linear", "linear"), ("cosine", "cosine"), ("sqrt", "1-sqrt")):
            wsd = changed(base, schedule="wsd", decay_steps=decay, decay_type=ours)
            expected = hugging_face(
                "warmup_stable_decay",
                wsd,
                num_decay_steps=decay,
                decay_type=theirs,
                min_lr_ratio=ratio,
            )
            # Theirs rises from the minimum, ours from 0.
            first = warmup if ratio else 0
            assert rates(wsd)[first:] == pytest.approx(expected[first:], abs=1e-12)


@pytest.mark.parametrize(
    ("decay_type", "left"),
    [
        ("linear", lambda p: 1 - p),
        ("cosine", lambda p: math.cos(math.pi * p / 2) ** 2),
        ("sqrt", lambda p: 1 - p**0.5),
    ],
)
def test_formulas_written_out(decay_type, left):
    # 100 steps: 10 up, 70 at the top, and by default a fifth down to a tenth.
    wsd = changed(COSINE, schedule="wsd", decay_type=decay_type)
    up, top = [(n + 1) / 10 for n in range(10)], [1.0] * 70
    down = [0.1 + 0.9 * left((n + 1) / 20) for n in range(20)]
    assert rates(wsd) == pytest.approx([*up, *top, *down])
    if decay_type != "sqrt":
        whole = [0.1 + 0.9 * left((n + 1) / 90) for n in range(90)]
        assert rates(changed(COSINE, schedule=decay_type)) == pytest.approx([*up, *whole])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"schedule": "wsd", "decay_steps": 91}, ["train.decay_steps", "91", "to 90 or less"]),
        ({"decay_steps": 5}, ["train.decay_steps: train.decay_steps = 5", "'cosine'", "'wsd'"]),
        ({"schedule": "linear", "decay_type": "sqrt"}, ["train.decay_type", "'linear'"]),
    ],
)
def test_a_decay_that_does_not_fit_is_refused(given, said):
    base = {"steps": 100, "warmup_steps": 10}
    assert validate(Config(train=TrainConfig(**base, schedule="wsd", decay_steps=90)), 1)
    with pytest.raises(ConfigError) as raised:
        validate(Config(train=TrainConfig(**{**base, **given})), 1)
    for part in said:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("train", "model", "said"),
    [
        ({"warmup_steps": 9}, {}, "AdamW, learning rate 0.003, schedule cosine after 9 steps of"),
        ({"warmup_steps": 10}, {}, "its warm-up of 10 steps leaves none of 10 to the schedule"),
        ({"optimizer": "muon"}, {}, "learning rate 0.003 for all else, schedule"),
        ({"optimizer": "muon"}, {"experts": 4}, "for all else, experts included, schedule"),
    ],
)
def test_a_run_says_what_its_learning_rate_does(train, model, said, tmp_path):
    config = tiny_config(model=model, **{"steps": 10, "learning_rate": 3e-3, **train})
    prepared = open_prepared(prepare_words(tmp_path, documents=12))
    assert said in describe_run(validate(config, 1), prepared).splitlines()[-1]


def test_constant_stays_however_long_the_run_becomes():
    assert rates(CONSTANT)[9:] == [1.0] * 91
    assert rates(changed(CONSTANT, steps=500))[:100] == rates(CONSTANT)


def test_a_rewarm_is_a_straight_line_to_the_schedule():
    longer = changed(COSINE, steps=200, rewarm_steps=5)
    found, plain = rates(longer, Rewarm(100, 0.1)), rates(longer)
    assert found[:100] == plain[:100]
    assert found[104:] == plain[104:]
    line = [0.1 + (plain[100 + n] - 0.1) * (n + 1) / 5 for n in range(5)]
    assert found[100:105] == pytest.approx(line)
    assert sorted(found[100:105]) == found[100:105]
    assert rates(COSINE)[99] < found[100]


def saved(folder: Path, progress: Progress, config: TrainConfig) -> Checkpoint:
    state = {"step": progress.step, **progress.state(config)}
    (folder / "state.json").write_text(json.dumps(state))
    return Checkpoint(progress.step, folder)


def resumed(
    folder: Path, config: TrainConfig, caplog: pytest.LogCaptureFixture
) -> tuple[Progress, str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "pcomm.train"):
        progress = Progress.resumed(
            Checkpoint(json.loads((folder / "state.json").read_text())["step"], folder), config
        )
    return progress, caplog.text


def test_what_is_not_changed_is_not_mentioned(tmp_path, caplog):
    for config, step in ((COSINE, 40), (CONSTANT, 100)):
        saved(tmp_path, Progress(step, skipped=3), config)
        longer = config if config is COSINE else changed(config, steps=300)
        assert resumed(tmp_path, longer, caplog) == (Progress(step, skipped=3), "")


def test_a_finished_run_that_is_made_longer_says_that_the_rate_jumps(tmp_path, caplog):
    saved(tmp_path, Progress(100), COSINE)
    longer = changed(COSINE, steps=200)
    progress, said = resumed(tmp_path, longer, caplog)
    assert progress == Progress(100)
    after = learning_rate(longer, 100)
    assert after > 5 * learning_rate(COSINE, 99)
    assert f"jumps from 0.1 to {after:.3g}" in said
    assert "(train.steps was 100 and is 200)" in said
    assert "train.rewarm_steps" in said
    assert "train.schedule=constant" in said
    # A finished run that stays finished has no next step.
    assert resumed(tmp_path, COSINE, caplog)[1] == ""


def test_with_rewarm_steps_it_does_not_jump_also_after_another_start(tmp_path, caplog):
    saved(tmp_path, Progress(100), COSINE)
    longer = changed(COSINE, steps=200, rewarm_steps=8)
    progress, said = resumed(tmp_path, longer, caplog)
    assert progress.rewarm == Rewarm(100, pytest.approx(0.1))
    assert "after train.rewarm_steps = 8" in said
    steps = rates(longer, progress.rewarm)
    assert abs(steps[100] - learning_rate(COSINE, 99)) < 0.1
    # Interrupted on the way: the same line is followed to its end.
    saved(tmp_path, Progress(103, rewarm=progress.rewarm), longer)
    again, said = resumed(tmp_path, longer, caplog)
    assert (again.rewarm, said) == (progress.rewarm, "")
    assert rates(longer, again.rewarm) == steps


def test_another_peak_is_said_too(tmp_path, caplog):
    saved(tmp_path, Progress(40), COSINE)
    progress, said = resumed(tmp_path, changed(COSINE, learning_rate=0.5), caplog)
    assert progress == Progress(40)
    assert "jumps from" in said
    assert "(train.learning_rate was 1.0 and is 0.5)" in said


def test_a_jump_that_three_digits_do_not_show_is_shown_with_more(tmp_path, caplog):
    config = changed(COSINE, steps=1000, learning_rate=3e-4)
    saved(tmp_path, Progress(13), config)
    said = resumed(tmp_path, changed(config, steps=1001), caplog)[1]
    found = re.search(r"jumps from (\S+) to (\S+), since", said)
    assert found is not None, said
    assert found.groups() == ("0.000299994", "0.000299989")


def test_a_rate_that_stays_where_it_is_does_not_jump(tmp_path, caplog):
    saved(tmp_path, Progress(10), COSINE)
    assert learning_rate(COSINE, 9) == 1.0 > learning_rate(COSINE, 10)
    assert resumed(tmp_path, changed(COSINE, schedule="constant"), caplog) == (Progress(10), "")


@pytest.mark.parametrize(
    "state",
    [
        {"skipped": "2"},
        {"learning_rate": 3},
        {"learning_rate": {"last": "x", "next": 1}},
        {"learning_rate": {"last": 1.0}},
        {"rewarm": [1]},
        {"rewarm": ["1", 2.0]},
        {"rewarm": [1, None]},
    ],
)
def test_a_state_that_no_run_wrote(tmp_path, state):
    (tmp_path / "state.json").write_text(json.dumps({"step": 4, **state}))
    with pytest.raises(ConfigError, match=r"state\.json with skipped"):
        Progress.resumed(Checkpoint(4, tmp_path), COSINE)


def test_a_state_of_an_earlier_version(tmp_path):
    (tmp_path / "state.json").write_text('{"step": 4}')
    assert Progress.resumed(Checkpoint(4, tmp_path), COSINE) == Progress(4)


def test_muon_follows_the_schedule_from_a_peak_of_its_own(tmp_path, caplog):
    muon = changed(COSINE, optimizer="muon", muon_learning_rate=0.25)
    for step in (0, 9, 54, 99):
        rate, muon_rate = learning_rates(muon, step)
        assert rate == learning_rate(COSINE, step)
        assert muon_rate == pytest.approx(rate / 4)
        assert learning_rates(COSINE, step) == (rate, 0.0)
    # Its rate alone is another one in the next start.
    last = learning_rates(muon, 49)
    slower = changed(muon, muon_learning_rate=0.05, rewarm_steps=2)
    saved(tmp_path, Progress(50), muon)
    assert resumed(tmp_path, muon, caplog) == (Progress(50), "")
    progress, said = resumed(tmp_path, slower, caplog)
    assert progress.rewarm == Rewarm(50, *last)
    assert "train.muon_learning_rate was 0.25 and is 0.05" in said
    between = (last[1] + learning_rates(slower, 50)[1]) / 2
    assert learning_rates(slower, 50, progress.rewarm)[1] == pytest.approx(between)
    after = learning_rates(slower, 51, progress.rewarm)
    assert after == pytest.approx(learning_rates(slower, 51))
    _, said = resumed(tmp_path, changed(slower, rewarm_steps=0), caplog)
    assert "Muon's learning rate jumps from" in said
    assert "the learning rate jumps" not in said
    _, said = resumed(tmp_path, changed(slower, rewarm_steps=0, learning_rate=0.5), caplog)
    assert re.search(r"the learning rate jumps from .* and Muon's learning rate jumps from", said)
    # Saved on the way, and read again.
    saved(tmp_path, Progress(51, 0, progress.rewarm), slower)
    assert resumed(tmp_path, slower, caplog)[0].rewarm == progress.rewarm
