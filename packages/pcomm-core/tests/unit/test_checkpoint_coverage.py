"""A checkpoint with a hole is refused, whatever the boxes; against a mask of every element."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from pcomm.core.checkpoint.dcp import Box, ShardLoadPlanner, ShardSavePlanner, first_gap
from pcomm.core.checkpoint.views import FlatRange, ShardView
from pcomm.core.errors import ConfigError
from pcomm.core.layout import Layout
from pcomm.core.tensor_parallel.split import ParamLayout, take_shard
from pcomm.core.testing.assertions import assert_equal


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    starts = [draw(st.integers(0, n)) for n in shape]
    return Box.at(starts, [draw(st.integers(0, 4)) for _ in starts])


def mark(mask: torch.Tensor, box: Box) -> torch.Tensor:
    place = tuple(slice(a, b) for a, b in zip(box.starts, box.stops, strict=True))
    view: torch.Tensor = mask[place]
    return view


@given(st.lists(st.integers(0, 4), max_size=3).map(tuple), st.data())
def test_the_first_gap_is_that_of_a_mask(shape: tuple[int, ...], data: st.DataObject) -> None:
    parts = data.draw(st.lists(boxes(shape), max_size=8))
    mask = torch.zeros(shape, dtype=torch.bool)
    for part in parts:
        mark(mask, part).fill_(True)
    gap = first_gap(Box.at([0] * len(shape), shape), parts)
    assert (gap is None) == bool(mask.all())
    if gap is not None:
        missing = mark(mask, gap)
        assert missing.numel()
        assert not missing.any()


# One process saves and loads without torch.distributed, which torch warns about each time.
alone = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def save(folder: Path, views: dict[str, ShardView]) -> None:
    dcp.save(views, checkpoint_id=folder, planner=ShardSavePlanner(), no_dist=True)


def load(folder: Path, views: dict[str, ShardView]) -> None:
    dcp.load(views, checkpoint_id=folder, planner=ShardLoadPlanner(), no_dist=True)


def refusal(folder: Path, views: dict[str, ShardView]) -> str:
    """What is said of a checkpoint that does not hold all of `views`."""
    with pytest.raises(CheckpointException) as caught:
        load(folder, views)
    error = caught.value.failures[0][0]
    assert isinstance(error, ConfigError)
    return str(error)


def forget(folder: Path, name: str, offset: tuple[int, ...]) -> None:
    """Leave one saved chunk out, as if its rank had not written it."""
    path = folder / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())
    saved = metadata.state_dict_metadata[name]
    assert isinstance(saved, TensorStorageMetadata)
    kept = [chunk for chunk in saved.chunks if tuple(chunk.offsets) != offset]
    assert len(kept) == len(saved.chunks) - 1
    saved.chunks[:] = kept
    path.write_bytes(pickle.dumps(metadata))


@alone
def test_a_chunk_that_no_rank_saved_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    logical = torch.arange(1200.0).view(300, 4)
    # Queries and keys of two ranks: this rank's file has rows 0-99 and 200-249.
    fused = Layout.sections([Layout.even(200, 2), Layout.even(100, 2)])
    mine = ShardView(take_shard(logical, fused, 0), ParamLayout(fused), 0)
    other = torch.arange(10.0)
    save(tmp_path, {"qk": mine, "norm": ShardView(other, ParamLayout(), 0)})

    target = ShardView(torch.full((150, 4), -1.0), ParamLayout(fused), 0)
    whole = ShardView(torch.full((300, 4), -1.0), ParamLayout(), 0)
    norm = ShardView(torch.full((10,), -1.0), ParamLayout(), 0)
    load(tmp_path, {"qk": target, "norm": norm})
    assert_equal(target.tensor, mine.tensor)
    assert_equal(norm.tensor, other)

    norm.tensor.fill_(-1.0)
    # A whole tensor needs the other rank's rows, which were never written.
    assert "qk[100:200, 0:4]: no saved chunk" in refusal(tmp_path, {"norm": norm, "qk": whole})
    assert torch.equal(whole.tensor, torch.full((300, 4), -1.0))
    assert torch.equal(norm.tensor, torch.full((10,), -1.0))
    # So does a range of a flattened tensor, from the middle of a row on.
    flat = ShardView(torch.full((10,), -1.0), ParamLayout(), 0, FlatRange(394, (300, 4)))
    assert "qk[100:101, 0:4]: no saved chunk" in refusal(tmp_path, {"qk": flat})
    # And a chunk that has gone from the list of the saved ones.
    forget(tmp_path, "qk", (200, 0))
    target.tensor.fill_(-1.0)
    assert "qk[200:250, 0:4]: no saved chunk" in refusal(tmp_path, {"qk": target})
    assert torch.equal(target.tensor, torch.full((150, 4), -1.0))


@alone
def test_a_number_that_was_not_saved_is_missed_too(tmp_path: Path) -> None:
    save(tmp_path, {"step": ShardView(torch.tensor(3.0), ParamLayout(), 0)})
    target = ShardView(torch.tensor(-1.0), ParamLayout(), 0)
    load(tmp_path, {"step": target})
    assert float(target.tensor) == 3.0
    forget(tmp_path, "step", ())
    assert "step[]: no saved chunk" in refusal(tmp_path, {"step": target})
