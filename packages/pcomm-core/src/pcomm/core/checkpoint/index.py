"""The index of a checkpoint, read without running what a stranger may have put in it.

torch writes it as a pickle, which can name any function to be called while it is read. Here only
the plain classes that torch writes are found; a run's folder can be opened like any other data.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.serialization import _get_layout

__all__ = ["SafeReader"]

_METADATA = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_DTYPES = tuple(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))

_ALLOWED = MappingProxyType(
    {
        **{(metadata.__name__, name): getattr(metadata, name) for name in _METADATA},
        **{("torch", name): getattr(torch, name) for name in _DTYPES},
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): _get_layout,
        (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
        # Where the checkpoint was written, which says nothing about where it is now.
        ("pathlib", "PosixPath"): pathlib.PurePosixPath,
        ("pathlib", "WindowsPath"): pathlib.PureWindowsPath,
        ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
        ("pathlib._local", "WindowsPath"): pathlib.PureWindowsPath,
    }
)
"""What may be named in an index, by module and name."""


class SafeReader(FileSystemReader):
    """Reads what torch's own reader reads; an index that names anything else is an error.

    Tensors are read by torch with `weights_only=True`, from files beside the index alone.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index.

        Raises:
            pickle.UnpicklingError: It names what no index holds, or is no index.
        """
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            index = _IndexUnpickler(io.BytesIO(file.read())).load()
        if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
            raise pickle.UnpicklingError(f"a {type(index).__name__} in place of an index")
        for entry in index.storage_data.values():
            _check_entry(entry)
        if index.storage_meta is None:
            index.storage_meta = StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which is not part of an index"
            ) from None


def _check_entry(entry: object) -> None:
    """Refuse an entry that leads out of the folder, or through a decoder that we did not write."""
    if not isinstance(entry, filesystem._StorageInfo) or not isinstance(entry.relative_path, str):
        raise pickle.UnpicklingError(f"a {type(entry).__name__} in place of a file's name")
    if Path(entry.relative_path).name != entry.relative_path or entry.relative_path in ("", ".."):
        raise pickle.UnpicklingError(f"the file {entry.relative_path!r}, outside of its folder")
    if getattr(entry, "transform_descriptors", None):
        raise pickle.UnpicklingError(f"a file that was written as {entry.transform_descriptors}")
