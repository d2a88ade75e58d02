"""kill -9 in the middle of a save: the run goes on from the checkpoint before, bit for bit."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from integration_support.forked_commands import ForkedCommand
from pcomm.core.checkpoint import ShardView
from pcomm.core.tensor_parallel import param_layouts_of
from pcomm.core.testing.programs import is_running, wait_until
from pcomm.integration.checkpoint.folders import checkpoints
from pcomm.integration.checkpoint.state import read
from pcomm.integration.llm import load_model

BLOCKED = Path(__file__).with_name("blocked_train.py")


@pytest.fixture(scope="module")
def uninterrupted(
    train: Callable[..., int], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The folder of a run that was not killed, made once for each number of ranks."""
    made: dict[str, Path] = {}

    def run(ranks: str) -> Path:
        if ranks not in made:
            made[ranks] = tmp_path_factory.mktemp("uninterrupted") / "run"
            assert train(made[ranks], "--ranks", ranks) == 0
        return made[ranks]

    return run


# All ranks write, and the first one alone gives the name. Ranks that die in a save, and those of a
# command that is killed, are in the gate elsewhere.
@pytest.mark.parametrize(
    ("place", "ranks"),
    [
        pytest.param("write", "2", marks=pytest.mark.soak),
        ("commit", "1"),
        pytest.param("write", "1", marks=pytest.mark.soak),
        pytest.param("commit", "2", marks=pytest.mark.soak),
    ],
)
def test_killed_during_a_save(
    place, ranks, start, fork, started, train, uninterrupted, config_file, tmp_path, capfd
):
    out, marks = tmp_path / "run", tmp_path / "marks"
    marks.mkdir()
    options = ["--config", config_file, "--out", out, "--ranks", ranks]
    words = (BLOCKED, place, marks, "train", *options)
    # Ranks run the script of a fresh process, and so has each its trap.
    process = fork(*words) if ranks == "1" else start("python", *words)
    # The name is given by the first rank alone; the files are written by all.
    wait_for(marks, "blocked-*", 1 if place == "commit" else int(ranks), process)
    pids = {process.pid} | {int(mark.name.removeprefix("pid-")) for mark in marks.glob("pid-*")}
    assert len(pids) == (1 if ranks == "1" else 3)
    process.kill()
    process.wait()
    # Neither a rank nor what multiprocessing starts outlives the command.
    wait_until(lambda: not started.running(), "the end of all processes")
    assert not any(map(is_running, pids))

    folders = [path.name for path in sorted((out / "checkpoints").iterdir())]
    assert folders == ["step-00000002", "step-00000004.partial"]
    written = list((out / "checkpoints" / folders[1]).glob("*.distcp"))
    assert len(written) == int(ranks)
    assert all(file.stat().st_size > 0 for file in written)

    assert train(out, "--ranks", ranks) == 0
    left = [path.name for path in sorted((out / "checkpoints").iterdir())]
    assert left == ["step-00000004", "step-00000006"]
    assert rows(out) == rows(uninterrupted(ranks))
    assert_same_weights(out, uninterrupted(ranks))
    if ranks == "1":
        log = capfd.readouterr().err
        assert "step-00000004.partial" in log
        assert f"resuming {out} after step 2" in log


def wait_for(
    folder: Path, pattern: str, count: int, process: subprocess.Popen[str] | ForkedCommand
) -> None:
    def are_there() -> bool:
        if process.poll() is not None:
            pytest.fail(f"ended with {process.returncode}:\n{process.communicate()}")
        return len(list(folder.glob(pattern))) >= count

    wait_until(are_there, f"{count} of {pattern}")


def rows(run: Path) -> list[tuple[int, float | None, float | None, float | None]]:
    """What does not depend on the clock, of every row; each row once."""
    parsed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "loss", "grad_norm", "bits_per_byte")
    return [tuple(row.get(key) for key in keys) for row in parsed]


def assert_same_weights(mine: Path, other: Path) -> None:
    pairs = zip(tensors(mine), tensors(other), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def tensors(run: Path) -> list[torch.Tensor]:
    """Weights and optimizer averages of the last checkpoint."""
    model = load_model(run).model
    found = [parameter.detach() for parameter in model.parameters()]
    for moment in ("exp_avg", "exp_avg_sq"):
        views = {
            f"optimizer.{moment}.{name}": ShardView(torch.zeros_like(p), param_layout, 0)
            for (name, p), param_layout in zip(
                model.named_parameters(), param_layouts_of(model).values(), strict=True
            )
        }
        read(checkpoints(run)[-1], views)
        found += [view.tensor for view in views.values()]
    return found
