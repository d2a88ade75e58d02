"""Runs on a mixture of sources: they go on where they were, and not as another mixture."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from integration_support.short_runs import run_words, write_words
from pcomm.core.errors import ConfigError
from pcomm.core.testing import ranks
from pcomm.integration import recipes
from pcomm.integration.checkpoint.folders import newest
from pcomm.integration.config.toml import apply_overrides
from pcomm.integration.forecast import dry_run as dry_run_module
from pcomm.integration.forecast.dry_run import dry_run


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_words(folder / "words", documents=30)
    (folder / "few.md").write_text("a few lines of another kind\n" * 12)
    return folder


def mixture(text: Path, weights: str = "[3, 1]") -> list[str]:
    paths = [str(text / "words"), str(text / "few.md")]
    return [f"data.path={json.dumps(paths)}", f"data.weights={weights}", "train.schedule=constant"]


def losses(run: Path) -> list[tuple[float, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


@ranks(2)
def test_it_goes_on_bit_for_bit_with_the_rows_that_were_due(rank, text, tmp_path):
    run_words("none.txt", tmp_path / "whole", *mixture(text), "train.steps=4")
    for steps in (2, 4):
        run_words("none.txt", tmp_path / "parts", *mixture(text), f"train.steps={steps}")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(set(losses(tmp_path / "whole"))) == 4


def test_other_weights_are_refused_by_the_run_and_by_its_dry_run_alike(text, tmp_path):
    run = tmp_path / "run"
    run_words("none.txt", run, *mixture(text), "train.steps=2")
    assert newest(run).state()["identity"]["train"]["weights"] == [3.0, 1.0]
    alone = [f"data.path={json.dumps([str(text / 'words')])}", "train.schedule=constant"]
    for changed in (mixture(text, "[1, 1]"), alone):
        config = apply_overrides(recipes.tiny(), [*changed, "train.steps=4"])
        with pytest.raises(ConfigError, match=r"data\.weights was \[3\.0, 1\.0\] and is") as real:
            run_words("none.txt", run, *changed, "train.steps=4")
        with pytest.raises(ConfigError) as dry:
            dry_run(config, run, 1)
        assert str(dry.value) == str(real.value)


def test_the_dry_run_tells_each_source_and_keeps_no_tokens(text, tmp_path, monkeypatch):
    # This machine, which is no matter here, is measured for a moment only.
    monkeypatch.setattr(dry_run_module, "_REPLAY_S", 0.01)
    cache = tmp_path / "cache"
    config = apply_overrides(recipes.tiny(), [*mixture(text), f"data.cache={cache}"])
    needs = str(dry_run(config, tmp_path / "run", 1))
    assert f"75.0% of the rows from {text / 'words'}: " in needs
    assert f"25.0% of the rows from {text / 'few.md'}: 1 documents of " in needs
    assert not cache.exists()


def test_a_source_that_vanished_is_named(text, tmp_path):
    gone = tmp_path / "gone.md"
    shutil.copyfile(text / "few.md", gone)
    paths = json.dumps([str(text / "words"), str(gone)])
    words = [f"data.path={paths}", "data.weights=[1, 1]", "train.schedule=constant"]
    run_words("none.txt", tmp_path / "run", *words, "train.steps=2")
    gone.unlink()
    with pytest.raises(ConfigError, match=r"gone\.md: no such file"):
        run_words("none.txt", tmp_path / "run", *words, "train.steps=4")
