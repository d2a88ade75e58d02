"""Checkpoints that cannot be written, or that are not this run's: an error on every rank."""

from __future__ import annotations

import errno
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from integration_support.short_runs import run_words, train_quietly, write_words
from pcomm.core import Group, Layout, PcommError, connect
from pcomm.core.checkpoint import ShardView
from pcomm.core.errors import ConfigError, PeerError
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.core.testing import ranks
from pcomm.integration import recipes
from pcomm.integration.checkpoint import saver as saver_module
from pcomm.integration.checkpoint.folders import checkpoints, newest, remove_partial
from pcomm.integration.checkpoint.saver import Saver
from pcomm.integration.checkpoint.state import read
from pcomm.integration.config.rules import validate
from pcomm.integration.config.toml import load_config
from pcomm.integration.parallelize import ALL_RANKS, open_run_groups


@contextmanager
def checkpoint_group() -> Iterator[Group]:
    with connect() as world:
        resolved = validate(recipes.tiny(), world.size)
        with open_run_groups(resolved, world) as groups:
            yield groups[ALL_RANKS, "checkpoint"]


@ranks(2)
def test_a_tensor_that_one_rank_misses_stops_both(rank, tmp_path):
    view = ShardView(torch.ones(4), ParamLayout(), 0)
    with checkpoint_group() as group:
        with Saver(tmp_path, group, keep=1, is_asynchronous=False) as saver:
            saver.save(1, {"there": view}, {})
        saved = checkpoints(tmp_path)[0]
        wanted = {"there": view, "not there": view} if rank else {"there": view}
        with pytest.raises(ConfigError, match=r"not there of shape \(4,\): nothing under that"):
            read(saved, wanted, group)
        longer = ShardView(torch.ones(4 + rank), ParamLayout(), 0)
        with pytest.raises(ConfigError, match=r"there of shape \(5,\): shape \(4,\) under"):
            read(saved, {"there": longer}, group)


@ranks(2, leaves="torch's archive writer keeps the frames of a write that failed")
def test_a_disk_that_is_full(rank, tmp_path):
    """The operating system's own error, in the middle of a large tensor on one rank."""
    generator = torch.Generator().manual_seed(rank)
    layout = Layout.even(2 << 18, 2)
    tensor = torch.rand(1 << 18, generator=generator)
    views = {"x": ShardView(tensor, ParamLayout(layout, 0), rank)}
    with checkpoint_group() as group:
        saver = Saver(tmp_path, group, keep=1, is_asynchronous=True)
        saver.save(1, views, {})
        saver.wait()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
        try:
            saver.save(2, views, {})
            with pytest.raises(ConfigError, match=r"step 2 in .*: rank 1: OSError: .*too large"):
                saver.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [checkpoint.step for checkpoint in checkpoints(tmp_path)] == [1]


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


FAILURES = {
    "writing on rank 1": (1, FileSystemWriter, "write_data"),
    "creating the folder on rank 1": (1, FileSystemWriter, "prepare_local_plan"),
    "the index on rank 0": (0, FileSystemWriter, "finish"),
    "the final name on rank 0": (0, saver_module, "commit"),
}


@pytest.mark.parametrize("name", FAILURES)
@ranks(2)
def test_a_save_that_fails_on_one_rank_fails_on_all(rank, name, tmp_path):
    where, owner, attribute = FAILURES[name]
    views = {"x": ShardView(torch.ones(4), ParamLayout(), 0)}
    with checkpoint_group() as group:
        saver = Saver(tmp_path, group, keep=None, is_asynchronous=True)
        saver.save(1, views, {})
        saver.wait()
        broken = no_room if rank == where else getattr(owner, attribute)
        with patch.object(owner, attribute, broken):
            saver.save(2, views, {})
            with pytest.raises(ConfigError, match=f"step 2 in .*: rank {where}: OSError: .*No spa"):
                saver.wait()
        saver.close()
        assert [checkpoint.step for checkpoint in checkpoints(tmp_path)] == [1]
    if rank == 0:
        assert [folder.name for folder in remove_partial(tmp_path)] == ["step-00000002.partial"]
        left = [folder.name for folder in (tmp_path / "checkpoints").iterdir()]
        assert left == ["step-00000001"]


def train(run_dir: Path, *overrides: str) -> None:
    """What `pcomm train` does on each rank, with a few keys changed."""
    config = load_config(run_dir / "config.toml", overrides=overrides)
    train_quietly(config, run_dir)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps, on one process."""
    folder = tmp_path_factory.mktemp("finished")
    text = write_words(folder / "text", documents=20)
    lines = "".join(f'{{"text": "line {n}"}}\n' for n in range(20))
    (folder / "text" / "other.jsonl").write_text(lines)
    run_words(text, folder / "run")
    return folder


REFUSED = {
    "model.layers=3": "model.layers was 2 and is 3",
    "model.mlp_width=auto": "model.mlp_width was 64 and is 128",
    "model.qk_norm=true": "model.qk_norm was False and is True",
    "data.vocabulary=400": "data.vocabulary was 320 and is 400",
    "data.vocabulary=300": "data.vocabulary was 320 and is 300",
    "train.seed=7": "train.seed was 0 and is 7",
    "train.global_batch_tokens=512": "train.global_batch_tokens was 256 and is 512",
    "train.steps=3": "train.steps = 3: a checkpoint after step 4",
    "model.layers=1 train.seed=5": "layers was 2 and is 1; .*train.seed was 0 and is 5",
}


@ranks(2)
def test_a_checkpoint_of_another_run_is_refused_on_every_rank(rank, finished):
    before = contents(finished / "run")
    for overrides, message in REFUSED.items():
        with pytest.raises(ConfigError, match=message):
            train(finished / "run", *overrides.split())
    # So the run can still be resumed, and written from.
    assert contents(finished / "run") == before


def contents(run_dir: Path) -> dict[str, bytes]:
    files = [file for file in run_dir.rglob("*") if file.is_file()]
    return {str(file.relative_to(run_dir)): file.read_bytes() for file in files}


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be changed."""
    return shutil.copytree(finished / "run", tmp_path / "run")


@ranks(2)
def test_another_corpus_is_refused_and_the_run_goes_on_with_its_own(rank, copied, finished):
    before = contents(copied)
    # The first rank reads the text, and so finds it.
    kind = PeerError if rank else ConfigError
    with pytest.raises(kind, match=r"the text of data.path.* was '\w+' and is '\w+'"):
        train(copied, f"data.path=['{finished}/text/other.jsonl']")
    # The other rank may look while the first still has its lock there.
    assert rank or contents(copied) == before
    train(copied, "train.steps=5")
    assert newest(copied).step == 5


DAMAGES = {
    "state.json torn": ("state.json", lambda content: content[:-20], "state.json: "),
    "state.json gone": ("state.json", None, r"state\.json: .*No such file"),
    "state.json of another kind": ("state.json", lambda content: b"[1, 2]", "no JSON object"),
    "state.json without an identity": ("state.json", lambda content: b"{}", "layers was None"),
    "index torn": (".metadata", lambda content: content[:100], "cannot be read: .*Error"),
    "index gone": (".metadata", None, "cannot be read: FileNotFoundError"),
    "tensors torn": ("__0_0.distcp", lambda content: content[:9000], "file __0_0.distcp does not"),
    "tensors gone": ("__0_0.distcp", None, "__0_0.distcp cannot be read: FileNotFoundError"),
    "zeros": ("__0_0.distcp", lambda c: c[:9000] + bytes(4000) + c[13000:], "file __0_0.distcp"),
    "one bit": (
        "__0_0.distcp",
        lambda c: c[:20000] + bytes([c[20000] ^ 1]) + c[20001:],
        "checksum",
    ),
    "checksums torn": ("checksums.json", lambda content: content[:40], "checksums.json cannot be"),
    "checksums of a name that no file has": (
        "checksums.json",
        lambda _: rb'{"files": {"a\u0000b": ""}}',
        "cannot be read: ValueError",
    ),
}


# One that each rank finds, and one in a file that a single rank checks.
FOUND_ON_RANKS = ("index gone", "one bit")


def damage(name: str, folder: Path) -> None:
    file, change, _ = DAMAGES[name]
    path = folder / file
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("name", [name for name in DAMAGES if name not in FOUND_ON_RANKS])
def test_a_damaged_checkpoint_is_named(name, copied):
    folder = newest(copied).folder
    damage(name, folder)
    with pytest.raises(ConfigError, match=DAMAGES[name][2]) as caught:
        train(copied)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", FOUND_ON_RANKS)
@ranks(2)
def test_a_damaged_checkpoint_is_named_on_every_rank(rank, name, copied):
    checkpoint = newest(copied)
    with checkpoint_group() as group:
        if rank == 0:
            damage(name, checkpoint.folder)
        # A first meeting of the ranks, so that the second finds the file changed.
        group.collectives.all_reduce(torch.zeros(1))
    # A rank that has read another share of the files hears of it from the one that found it.
    with pytest.raises(PcommError, match=DAMAGES[name][2]) as caught:
        train(copied)
    assert str(checkpoint.folder) in str(caught.value)
    assert "Error: checkpoint" in str(caught.value) or isinstance(caught.value, ConfigError)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(copied):
    """Its step counts the batches and the updates, so the run would silently be another one."""
    found = newest(copied).folder
    found.rename(found.with_name("step-00000005"))
    with pytest.raises(ConfigError, match=r"step-00000005: state\.json of step 4"):
        train(copied, "train.steps=6")


@ranks(2)
def test_damaged_metrics_stop_both_ranks_before_the_first_step(rank, copied):
    with checkpoint_group() as group:
        if rank == 0:
            (copied / "metrics.jsonl").write_text("no row\n")
        group.collectives.all_reduce(torch.zeros(1))
    kind = "PeerError" if rank else "ConfigError"
    with pytest.raises(Exception, match=r"metrics.jsonl, line 1") as caught:
        train(copied, "train.steps=5")
    assert type(caught.value).__name__ == kind


def test_the_configuration_may_change_in_what_decides_no_weights(copied):
    overrides = ["train.steps=6", "train.dtype=bf16", "checkpoint.keep=1", "train.eval_every=end"]
    train(copied, *overrides)
    assert [checkpoint.step for checkpoint in checkpoints(copied)] == [6]
    assert load_config(copied / "config.toml").train.dtype == "bf16"


@ranks(2)
def test_damage_offers_the_checkpoint_before_that_is_whole(rank, copied):
    with checkpoint_group() as group:
        if rank == 0:
            zero(newest(copied).folder / "__0_0.distcp", 4000)
        group.collectives.all_reduce(torch.zeros(1))
    good = copied / "checkpoints" / "step-00000002"
    with pytest.raises(PcommError, match=f"step-00000004 to go on from {good}, whose files are"):
        train(copied)
    with checkpoint_group() as group:
        if rank == 0:
            zero(good / "__0_0.distcp", 1)
        group.collectives.all_reduce(torch.zeros(1))
    with pytest.raises(PcommError, match="no earlier checkpoint that is whole"):
        train(copied)


def zero(file: Path, count: int) -> None:
    """Overwrite bytes in the middle of a file, which keeps its length."""
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    assert any(content[middle : middle + count])
    content[middle : middle + count] = bytes(count)
    file.write_bytes(content)
