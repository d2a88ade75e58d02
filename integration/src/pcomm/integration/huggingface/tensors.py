"""The tensors of a directory: what its safetensors files hold, and their dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pcomm.core.errors import ConfigError
from pcomm.integration.huggingface.directory import ModelDirectory

__all__ = ["DTYPES", "SHORT_NAMES", "TensorFiles", "dtypes_of", "saved_dtypes"]


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file.

    Attributes:
        file: The file that holds it.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor, as the file format names it, such as `"BF16"`.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str


class TensorFiles:
    """The tensors of a directory; a context manager that closes the files.

    Opening reads the headers. `read` then reads the bytes of a slice, and no others.

    Args:
        directory: The directory, opened with its weights.

    Raises:
        ConfigError: A file is damaged or cut off, or does not hold what the index says; names the
            file and, where it is one tensor's, the tensor.
    """

    def __init__(self, directory: ModelDirectory) -> None:
        self._open: dict[Path, Any] = {}
        self.infos: Mapping[str, TensorInfo]
        """What there is, by name."""
        self.bytes_read = 0
        """Bytes that `read` has returned."""
        with ExitStack() as files:
            infos: dict[str, TensorInfo] = {}
            for path, promised in directory.shards.items():
                found = self._header(files, path)
                _check_promised(path, promised, found)
                for name, info in found.items():
                    if name in infos:
                        raise _two_files(name, infos[name].file, path)
                    infos[name] = info
            self.infos = infos
            self._files = files.pop_all()

    def read(self, name: str, *places: slice) -> Tensor:
        """A slice of a tensor, on the CPU, in the dtype of the file. Local.

        Args:
            name: A key of `infos`.
            places: Positions along the first dimensions; the others are read whole.

        Raises:
            ConfigError: The file cannot be read any more.
        """
        file = self.infos[name].file
        try:
            tensor: Tensor = self._open[file].get_slice(name)[places or ...]
        except (SafetensorError, OSError) as error:
            raise _damaged(file, f"the tensor {name}: {error}") from error
        self.bytes_read += tensor.nbytes
        return tensor

    def close(self) -> None:
        """Close the files. Calling it again does nothing."""
        self._files.close()
        self._open.clear()

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _header(self, files: ExitStack, path: Path) -> dict[str, TensorInfo]:
        try:
            self._open[path] = opened = files.enter_context(safe_open(path, framework="pt"))
            infos = {}
            for name in opened.keys():  # noqa: SIM118 - not a dict
                place = opened.get_slice(name)
                infos[name] = TensorInfo(path, tuple(place.get_shape()), place.get_dtype())
            return infos
        except (SafetensorError, OSError, ValueError) as error:
            raise _damaged(path, str(error)) from error


def _check_promised(
    path: Path, promised: frozenset[str] | None, found: Mapping[str, TensorInfo]
) -> None:
    missing = sorted((promised or frozenset()) - found.keys())
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ConfigError(
            f"model directory {path.parent}",
            found=f"{path.name} without the tensor {missing[0]}{others}, which the index says it "
            "holds",
            why="The index and the files are not of one model.",
            fix="Copy the index and all files again from one source.",
        )


def _two_files(name: str, first: Path, second: Path) -> ConfigError:
    return ConfigError(
        f"model directory {first.parent}",
        found=f"the tensor {name} in {first.name} and in {second.name}",
        why="Nothing says which of the two the model has.",
        fix="Copy the index and all files again from one source.",
    )


def _damaged(path: Path, found: str) -> ConfigError:
    return ConfigError(
        f"model directory {path.parent}",
        found=f"{path.name}: {found}",
        why="The file is no safetensors file, is damaged, or was cut off.",
        fix=f"Copy {path.name} again from where the directory came from.",
    )


DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes that are read, by their names in a safetensors file."""


SHORT_NAMES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
"""Names of those that a directory can be written in, as `--dtype` has them."""


def dtypes_of(directory: ModelDirectory) -> dict[str, Any]:
    """The most frequent dtype of a directory's weights, and the tensors of another, as JSON. Local.

    Raises:
        ConfigError: A file of the weights is damaged.
    """
    with TensorFiles(directory) as files:
        found = {name: info.dtype for name, info in files.infos.items()}
    most = Counter(found.values()).most_common(1)
    default = most[0][0] if most else "F32"
    return {
        "default": default,
        "exceptions": {name: kind for name, kind in sorted(found.items()) if kind != default},
    }


def saved_dtypes(content: Mapping[str, Any]) -> tuple[torch.dtype, dict[str, torch.dtype]]:
    """What `dtypes_of` has returned, as dtypes; fp32 where there is nothing. Local.

    Raises:
        ConfigError: It names what is no dtype.
    """
    try:
        default = DTYPES[content.get("default", "F32")]
        exceptions = content.get("exceptions", {})
        return default, {name: DTYPES[kind] for name, kind in exceptions.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            "dtypes.json",
            found=f"{error!r}",
            why="It says in which dtypes the weights are written.",
            fix="Remove the file, and give --dtype.",
        ) from error
