"""A checkpoint from a stranger: read like data, never run; and damage is seen."""

from __future__ import annotations

import enum
import hashlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader

from pcomm.core import Group, connect
from pcomm.core.checkpoint import SafeReader, ShardView
from pcomm.core.errors import ConfigError
from pcomm.core.tensor_parallel import ParamLayout
from pcomm.integration import recipes
from pcomm.integration.checkpoint.folders import Checkpoint, check_files, newest
from pcomm.integration.checkpoint.saver import Saver
from pcomm.integration.checkpoint.state import check_index, read
from pcomm.integration.config.rules import validate
from pcomm.integration.parallelize import ALL_RANKS, open_run_groups

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
# Megabytes, of which a page in the middle may go bad.
BIG = (1 << 10, 1 << 10)


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with connect() as world, open_run_groups(validate(recipes.tiny(), 1), world) as groups:
        yield groups[ALL_RANKS, "checkpoint"]


@pytest.fixture(scope="module")
def saved(group: Group, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with one checkpoint of 4 MiB."""
    run = tmp_path_factory.mktemp("saved")
    tensors = {f"x {dtype}": torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}
    tensors["big"] = torch.arange(1 << 20, dtype=torch.float32).reshape(BIG)
    with Saver(run, group, keep=None, is_asynchronous=False) as saver:
        saver.save(3, {n: ShardView(t, ParamLayout(), 0) for n, t in tensors.items()}, {})
    return run


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Checkpoint:
    """A copy, to be changed."""
    found = newest(shutil.copytree(saved, tmp_path / "run"))
    assert found is not None
    return found


def wanted() -> dict[str, ShardView]:
    return {"big": ShardView(torch.zeros(BIG), ParamLayout(), 0)}


class Malice:
    """Makes a file when it is unpickled."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[object, ...]:
        return self.call, self.arguments


def with_valid_checksums(checkpoint: Checkpoint, name: str, content: bytes) -> None:
    """As an attacker does it, who can compute a checksum as well."""
    (checkpoint.folder / name).write_bytes(content)
    listed = json.loads((checkpoint.folder / "checksums.json").read_text())
    listed["files"][name] = hashlib.blake2b(content, digest_size=16).hexdigest()
    (checkpoint.folder / "checksums.json").write_text(json.dumps(listed))
    check_files(checkpoint)


@pytest.mark.parametrize("way", ["instead", "within", "by a dotted name"])
def test_an_index_that_would_run_a_program(checkpoint, tmp_path, way):
    trap = tmp_path / "trap"
    if way == "by a dotted name":
        # A class that may be named, and from there on to what it can reach.
        content = (
            b"\x80\x04ctorch.distributed.checkpoint.metadata\n"
            b"ChunkStorageMetadata.__init__.__globals__\n."
        )
    else:
        bad = Malice(os.mkdir, str(trap))
        index = FileSystemReader(checkpoint.folder).read_metadata()
        index.planner_data = bad
        content = pickle.dumps(bad if way == "instead" else index)
        # It is a real one: torch's own reader runs it.
        copy = shutil.copytree(checkpoint.folder, tmp_path / "copy")
        (copy / ".metadata").write_bytes(content)
        with suppress(AttributeError):
            FileSystemReader(copy).read_metadata()
        assert trap.is_dir()
        trap.rmdir()
    with_valid_checksums(checkpoint, ".metadata", content)
    with pytest.raises(ConfigError, match=r"cannot be read: UnpicklingError: it names \S+"):
        check_index(checkpoint)
    with pytest.raises(ConfigError, match=r"cannot be read: .* it names \S+, which is not part"):
        read(checkpoint, wanted())
    assert not trap.exists()


def test_a_tensor_that_would_run_a_program(checkpoint, tmp_path):
    trap = tmp_path / "trap"
    content = bytearray((checkpoint.folder / "__0_0.distcp").read_bytes())
    entries = SafeReader(checkpoint.folder).read_metadata().storage_data
    [entry] = [info for index, info in entries.items() if index.fqn == "big"]
    file = tmp_path / "tensor.pt"
    torch.save(Malice(os.mkdir, str(trap)), file)
    content[entry.offset : entry.offset + entry.length] = file.read_bytes().ljust(entry.length)
    with_valid_checksums(checkpoint, "__0_0.distcp", bytes(content))
    with pytest.raises(ConfigError, match="cannot be read"):
        read(checkpoint, wanted())
    assert not trap.exists()


@pytest.mark.parametrize("name", ["../../secret.distcp", "/etc/passwd", ".."])
def test_an_index_that_leads_out_of_the_folder(checkpoint, name):
    index = FileSystemReader(checkpoint.folder).read_metadata()
    for entry in index.storage_data.values():
        entry.relative_path = name
    with_valid_checksums(checkpoint, ".metadata", pickle.dumps(index))
    with pytest.raises(ConfigError, match="outside of its folder"):
        check_index(checkpoint)


class EarlierPickler(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.2, that of Debian 12, does: by their names."""

    def reducer_override(self, obj: object) -> object:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def test_an_index_that_an_earlier_python_wrote(checkpoint):
    theirs = FileSystemReader(checkpoint.folder).read_metadata()
    content = io.BytesIO()
    EarlierPickler(content).dump(theirs)
    assert b"getattr" in content.getvalue()
    with_valid_checksums(checkpoint, ".metadata", content.getvalue())
    check_index(checkpoint)
    ours = SafeReader(checkpoint.folder).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata


@pytest.mark.parametrize(
    ("kind", "name"), [(dcp.metadata._MEM_FORMAT_ENCODING, "mro"), (dcp.Metadata, "__init__")]
)
def test_nothing_else_is_asked_for_by_its_name(checkpoint, kind, name):
    with_valid_checksums(checkpoint, ".metadata", pickle.dumps(Malice(getattr, kind, name)))
    with pytest.raises(ConfigError, match=rf"it asks for '{name}' of .*, which no index does"):
        check_index(checkpoint)


def test_torch_and_we_read_the_same_index(checkpoint):
    ours = SafeReader(checkpoint.folder).read_metadata()
    theirs = FileSystemReader(checkpoint.folder).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert {entry.properties.dtype for entry in ours.state_dict_metadata.values()} == set(DTYPES)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_reads_what_we_wrote(checkpoint):
    state = {"big": torch.zeros(BIG)}
    dcp.load(state, checkpoint_id=checkpoint.folder, no_dist=True)
    assert torch.equal(state["big"].flatten(), torch.arange(1 << 20, dtype=torch.float32))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json"])
def test_every_file_has_a_checksum(checkpoint, name):
    check_files(checkpoint)
    file = checkpoint.folder / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"the file {name} does not have the content"):
        check_files(checkpoint)
    file.unlink()
    with pytest.raises(ConfigError, match=f"the file {name} cannot be read: FileNotFound"):
        check_files(checkpoint)


def test_the_ranks_share_the_files(checkpoint):
    for name in ("__0_0.distcp", ".metadata", "state.json"):
        (checkpoint.folder / name).unlink()
        failed = []
        for rank in range(2):
            try:
                check_files(checkpoint, rank=rank, size=2)
            except ConfigError:
                failed.append(rank)
        assert failed


@pytest.mark.parametrize("content", ["[]", '{"files": 3}', '{"files": {"../x": ""}}', "{"])
def test_checksums_that_are_none(checkpoint, content):
    (checkpoint.folder / "checksums.json").write_text(content)
    with pytest.raises(ConfigError, match=r"checksums\.json cannot be read"):
        check_files(checkpoint)


def test_a_checkpoint_without_checksums_is_read_and_said(checkpoint, caplog):
    (checkpoint.folder / "checksums.json").unlink()
    check_files(checkpoint)
    assert "damage would go unseen" in caplog.text
