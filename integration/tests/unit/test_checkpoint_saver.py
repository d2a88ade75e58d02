"""What is on disk while checkpoints are written, kept and removed; on one process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from pcomm.core import Group, connect
from pcomm.core.checkpoint import ShardView
from pcomm.core.errors import ConfigError
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.core.testing.programs import PATIENCE_S
from pcomm.integration import recipes
from pcomm.integration.checkpoint import folders
from pcomm.integration.checkpoint.folders import best, checkpoints, newest, remove_partial
from pcomm.integration.checkpoint.saver import Saver
from pcomm.integration.checkpoint.state import read
from pcomm.integration.config.rules import validate
from pcomm.integration.parallelize import ALL_RANKS, open_run_groups


@pytest.fixture
def group() -> Iterator[Group]:
    with connect() as world, open_run_groups(validate(recipes.tiny(), 1), world) as groups:
        yield groups[ALL_RANKS, "checkpoint"]


def region(value: float) -> ShardView:
    return ShardView(torch.full((3, 2), value), ParamLayout(), 0)


def steps(run_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints(run_dir)]


class Delay:
    """Stands in for torch's `save`, and holds it back until the test says go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_over, self._save = threading.Event(), dcp.save
        monkeypatch.setattr(dcp, "save", self)

    def __call__(self, *arguments: object, **options: object) -> None:
        assert self.is_over.wait(PATIENCE_S)
        self._save(*arguments, **options)


def test_an_asynchronous_save_does_not_see_later_changes(group, tmp_path, monkeypatch):
    delay = Delay(monkeypatch)
    mine = region(1.0)
    with Saver(tmp_path, group, keep=1, is_asynchronous=True) as saver:
        saver.save(5, {"x": mine}, {"note": "kept"})
        mine.tensor.fill_(2.0)
        assert steps(tmp_path) == []
        delay.is_over.set()
        saver.wait()
    target = region(0.0)
    read(checkpoints(tmp_path)[0], {"x": target})
    assert torch.equal(target.tensor, torch.ones(3, 2))
    assert checkpoints(tmp_path)[0].state() == {"step": 5, "note": "kept"}


def test_a_synchronous_save_is_whole_when_it_returns(group, tmp_path):
    with Saver(tmp_path, group, keep=1, is_asynchronous=False) as saver:
        saver.save(5, {"x": region(1.0)}, {})
        assert steps(tmp_path) == [5]


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3, 4]), (1, [4]), (3, [2, 3, 4])])
def test_the_oldest_are_removed(group, tmp_path, keep, left):
    with Saver(tmp_path, group, keep=keep, is_asynchronous=True) as saver:
        for step in range(1, 5):
            saver.save(step, {"x": region(step)}, {})
    assert steps(tmp_path) == left
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(left)


@pytest.mark.parametrize(
    ("found", "left"),
    [
        ([3.0, 1.0, 2.0, 4.0], [2, 4]),
        # Of equals the newest; a step that was not evaluated is never the best.
        ([1.0, 1.0, 2.0, None], [2, 4]),
        ([4.0, 3.0, 2.0, 1.0], [4]),
        ([None, None, None, None], [4]),
    ],
)
def test_the_best_stays_beside_the_newest(group, tmp_path, found, left):
    with Saver(tmp_path, group, keep=1, keep_best=True, is_asynchronous=True) as saver:
        for step, bits in enumerate(found, start=1):
            state = {} if bits is None else {"bits_per_byte": bits}
            saver.save(step, {"x": region(step)}, state)
    assert steps(tmp_path) == left
    assert getattr(best(tmp_path), "step", None) == (left[0] if any(found) else None)
    assert newest(tmp_path).step == 4


def test_a_step_that_is_reached_again_replaces_its_checkpoint(group, tmp_path):
    with Saver(tmp_path, group, keep=None, is_asynchronous=True) as saver:
        for value in (1.0, 2.0):
            saver.save(7, {"x": region(value)}, {})
    target = region(0.0)
    read(checkpoints(tmp_path)[0], {"x": target})
    assert target.tensor[0, 0] == 2
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["step-00000007"]


def test_a_process_that_dies_while_it_removes_leaves_no_half_checkpoint(
    group, tmp_path, monkeypatch
):
    with Saver(tmp_path, group, keep=None, is_asynchronous=False) as saver:
        for step in (1, 2):
            saver.save(step, {"x": region(step)}, {})

    def die_half_way(folder: Path) -> None:
        (folder / ".metadata").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(folders.shutil, "rmtree", die_half_way)
        with pytest.raises(KeyboardInterrupt):
            folders.discard(checkpoints(tmp_path)[1].folder)
    assert steps(tmp_path) == [1]
    assert [folder.name for folder in remove_partial(tmp_path)] == ["step-00000002.discarded"]
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_what_else_lies_in_the_folder_is_no_checkpoint(tmp_path):
    parent = tmp_path / "checkpoints"
    for name in ("step-00000003", "step-00000009.partial", "step-best", "other"):
        (parent / name).mkdir(parents=True)
    (parent / "step-00000008").write_text("a file")
    assert steps(tmp_path) == [3]
    found = newest(tmp_path)
    assert found is not None
    assert found.step == 3
    assert newest(tmp_path / "nowhere") is None


def test_state_is_plain_json(group, tmp_path):
    """A person who looks for the step of a checkpoint finds it without torch."""
    with Saver(tmp_path, group, keep=1, is_asynchronous=True) as saver:
        saver.save(2, {"x": region(1.0)}, {"identity": {"model": {"layers": 2}}})
    text = (checkpoints(tmp_path)[0].folder / "state.json").read_text()
    assert json.loads(text) == {"step": 2, "identity": {"model": {"layers": 2}}}


def test_a_failed_save_is_raised_once(group, tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    saver = Saver(tmp_path, group, keep=1, is_asynchronous=True)
    saver.save(1, {"x": region(1.0)}, {})
    with pytest.raises(ConfigError, match=r"step 1 in .*: rank 0: (NotADirectory|FileExists)Error"):
        saver.close()
    saver.close()
