"""Dtypes of weights: what files call them, and which of them a directory has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from pcomm.core.errors import ConfigError
from pcomm.integration.huggingface.directory import ModelDirectory
from pcomm.integration.huggingface.tensor_files import TensorFiles

__all__ = ["DTYPES", "NAMES", "SHORT_NAMES", "dtypes_of", "saved_dtypes"]

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes that are read, by their names in a safetensors file."""

NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
"""Their names in `config.json`."""

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
