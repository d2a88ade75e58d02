"""Shards and states in checkpoints, and one with a hole, which is refused; against masks."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from pcomm.core.checkpoint.dcp import Box, ShardLoadPlanner, ShardSavePlanner, first_gap
from pcomm.core.checkpoint.views import FlatRange, ShardView, StateView
from pcomm.core.errors import ConfigError, DivergenceError, LayoutError
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
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


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


def test_a_number_that_was_not_saved_is_missed_too(tmp_path: Path) -> None:
    save(tmp_path, {"step": ShardView(torch.tensor(3.0), ParamLayout(), 0)})
    target = ShardView(torch.tensor(-1.0), ParamLayout(), 0)
    load(tmp_path, {"step": target})
    assert float(target.tensor) == 3.0
    forget(tmp_path, "step", ())
    assert "step[]: no saved chunk" in refusal(tmp_path, {"step": target})


def check(view: ShardView, logical: torch.Tensor) -> int:
    """Every chunk holds what the logical tensor has there; returns the number of elements."""
    count = 0
    for chunk, tensor in view.chunks():
        place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        assert tensor.shape == chunk.sizes
        assert torch.equal(logical[place], tensor)
        assert view.chunk_at(chunk.offsets).data_ptr() == tensor.data_ptr()
        count += tensor.numel()
    assert view.logical_shape == logical.shape
    return count


@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
def test_a_range_of_a_flattened_tensor(shape: tuple[int, ...], data: st.DataObject) -> None:
    logical = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, logical.numel()))
    stop = data.draw(st.integers(start, logical.numel()))
    flat = logical.view(-1)[start:stop].clone()
    if not shape and stop > start:
        flat = flat.view(())
    view = ShardView(flat, ParamLayout(), 0, FlatRange(start, shape))
    assert check(view, logical) == stop - start


@given(st.integers(1, 3), st.integers(0, 1), st.data())
def test_a_range_of_a_shard_of_a_fused_tensor(size: int, dim: int, data: st.DataObject) -> None:
    layout = Layout.sections([Layout.balanced(5, size), Layout.balanced(4, size)])
    logical = torch.arange(9 * 3).view(9, 3) if dim == 0 else torch.arange(3 * 9).view(3, 9)
    count = 0
    for rank in range(size):
        local = take_shard(logical, layout, rank, dim=dim).contiguous()
        cut = data.draw(st.integers(0, local.numel()))
        for start, stop in ((0, cut), (cut, local.numel())):
            flat_range = FlatRange(start, tuple(local.shape))
            flat = local.view(-1)[start:stop]
            count += check(ShardView(flat, ParamLayout(layout, dim), rank, flat_range), logical)
    assert count == logical.numel()


def test_a_whole_tensor_is_one_chunk() -> None:
    logical = torch.arange(6).view(2, 3)
    assert check(ShardView(logical, ParamLayout(), 0), logical) == 6
    assert check(ShardView(torch.tensor(3), ParamLayout(), 0), torch.tensor(3)) == 1


def test_a_dimension_may_be_counted_from_behind() -> None:
    logical = torch.arange(6 * 4).view(6, 4)
    layout = Layout.uneven([1, 3])
    for rank in range(2):
        local = take_shard(logical, layout, rank, dim=-1).contiguous()
        param_layout = ParamLayout(layout, dim=-1)
        assert check(ShardView(local, param_layout, rank), logical) == local.numel()
        flat_range = FlatRange(2, tuple(local.shape))
        assert check(ShardView(local.view(-1)[2:5], param_layout, rank, flat_range), logical) == 3


@pytest.mark.parametrize("rows", [2, 4], ids=["shorter", "longer"])
def test_a_tensor_that_is_not_the_shard_is_refused(rows: int) -> None:
    param_layout = ParamLayout(Layout.even(6, 2))
    for view in (
        ShardView(torch.zeros(rows, 2), param_layout, 1),
        ShardView(torch.zeros(1), param_layout, 1, FlatRange(0, (rows, 2))),
        ShardView(torch.zeros(2, 3), ParamLayout(Layout.even(6, 2), dim=2), 1),
    ):
        with pytest.raises(LayoutError, match="a shard of 3 positions on rank 1"):
            view.write_items("x")


STATE = {"count": 3, "names": ["a", ("b", 1.5)], "by": {2: None}, "mean": torch.arange(3.0)}


def views(holder: dict[str, Any], **options: Any) -> dict[str, ShardView]:
    like = torch.empty((), device="meta")
    return {
        key: StateView(like, ParamLayout(), 0, holder=lambda: holder, key=key, **options)
        for key in [*STATE, "gone"]
    }


@pytest.mark.parametrize("there", [{}, {"count": 1, "gone": 9, "mean": torch.zeros(3)}])
def test_every_value_comes_back(tmp_path: Path, there: dict[str, Any]) -> None:
    """Into a holder that has none of them, and into one that has others and one too many."""
    dcp.save(views(dict(STATE)), checkpoint_id=tmp_path, planner=ShardSavePlanner(), no_dist=True)
    found, mean = dict(there), there.get("mean")
    planner = ShardLoadPlanner()
    dcp.load(views(found), checkpoint_id=tmp_path, planner=planner, no_dist=True)
    planner.put()
    assert torch.equal(found.pop("mean"), STATE["mean"])
    assert mean is None or torch.equal(mean, STATE["mean"]), "a tensor that is there is filled"
    assert found == {key: value for key, value in STATE.items() if key != "mean"}


def test_an_object_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp.save(
            views({"count": object()}),
            checkpoint_id=tmp_path,
            planner=ShardSavePlanner(),
            no_dist=True,
        )
    error = caught.value.failures[0][0]
    assert isinstance(error, ConfigError)
    assert "count" in str(error)


def planned(holder: dict[str, Any], **options: Any) -> tuple[ShardSavePlanner, Any]:
    planner = ShardSavePlanner(is_first_rank_saved=True)
    planner.set_up_planner(views(holder, **options), None, True)
    return planner, planner.create_local_plan()


def test_values_that_must_agree_are_compared() -> None:
    planner, first = planned({"count": 3}, must_agree=True)
    planner.create_global_plan([first, planned({"count": 3}, must_agree=True)[1]])
    with pytest.raises(DivergenceError, match=r"\[3\] on rank 0, \[4\] on rank 1"):
        planner.create_global_plan([first, planned({"count": 4}, must_agree=True)[1]])


def test_values_that_may_differ_are_those_of_the_first_rank() -> None:
    planner, first = planned({"count": 3, "mean": torch.zeros(3)})
    plans, _ = planner.create_global_plan([first, planned({"count": 4, "mean": torch.ones(3)})[1]])
    assert [len(plan.items) for plan in plans] == [len(STATE) + 1, 0]
