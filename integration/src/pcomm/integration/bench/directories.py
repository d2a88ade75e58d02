"""Directories of models with random weights, which transformers and pcomm both read."""

from __future__ import annotations

from pathlib import Path

import torch

from pcomm.integration.bench.plain_tokenizer import write_plain_tokenizer
from pcomm.integration.bench.shapes import Shape
from pcomm.integration.testing.huggingface_models import write_directory

__all__ = ["Directories"]


class Directories:
    """Models by their shape, each written once.

    Args:
        folder: An existing folder for all of them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def of(self, shape: Shape, dtype: str = "float32") -> Path:
        """The directory of a model, written if it is not there. Local.

        Args:
            shape: Shape of the model.
            dtype: Name of the dtype of its weights.
        """
        folder = self._folder / f"{shape.name}-{dtype}"
        if not folder.exists():
            folder.mkdir()
            write_directory(folder, shape.family, dtype=getattr(torch, dtype), **shape.fields)
            write_plain_tokenizer(folder, shape.fields["vocab_size"])
        return folder
