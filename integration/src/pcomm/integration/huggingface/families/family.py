"""What a family of models is told by: two tables and a few names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pcomm.integration.huggingface.config_table import Field
from pcomm.integration.huggingface.tensor_table import Entry

__all__ = ["Family"]


@dataclass(frozen=True, eq=False)
class Family:
    """A family of Hugging Face models, as data.

    Attributes:
        model_type: Value of `model_type` in `config.json`.
        architecture: Class of transformers with a language model's head.
        fields: Table of the configuration.
        keys: Keys of `[model]` that have one value in the whole family.
        tensors: Table of the tensors.
        ignored: Regular expressions of tensors that a directory may hold and the model does not
            use.
        ignored_fields: Fields without effect on the numbers, beside those of every family.
    """

    model_type: str
    architecture: str
    fields: tuple[Field, ...]
    keys: Mapping[str, Any]
    tensors: tuple[Entry, ...]
    ignored: tuple[str, ...] = ()
    ignored_fields: tuple[str, ...] = ()
