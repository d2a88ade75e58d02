"""A directory's model, built and filled in one call."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from pcomm.core import Collectives, IdentityCollectives
from pcomm.integration.config import ParallelConfig
from pcomm.integration.config_rules import validate
from pcomm.integration.huggingface.directory import open_directory
from pcomm.integration.huggingface.dtypes import DTYPES, dtypes_of
from pcomm.integration.huggingface.model_config import read_model
from pcomm.integration.huggingface.run_start import directory_config
from pcomm.integration.huggingface.weights import load_weights
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.models.without_draws import WithoutDraws

__all__ = ["load_model"]


def load_model(
    folder: Path,
    *,
    collectives: Collectives | None = None,
    experts: Collectives | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> LanguageModel:
    """The model of a directory with this rank's part of its weights, to compute with. Local.

    Args:
        folder: The directory.
        collectives: Collectives of the tensor-parallel group; None for one rank.
        experts: Collectives of the expert-parallel group; None where this rank has all experts.
        device: Device of the parameters.
        dtype: Dtype of the parameters; None for the most frequent one of the directory.

    Raises:
        ConfigError: The directory is damaged, or the ranks cannot share the model.
        UnsupportedError: Its model is not supported.
    """
    tensor_parallel = collectives or IdentityCollectives()
    directory, config = open_directory(folder), directory_config(folder)
    ranks = tensor_parallel.size
    config = replace(config, parallel=ParallelConfig(tp=ranks))
    if dtype is None:
        # One that is not read is refused with its tensor's name, below.
        dtype = DTYPES.get(dtypes_of(directory)["default"], torch.float32)
    resolved = validate(config, ranks)
    with WithoutDraws():
        model = LanguageModel(
            resolved.model,
            resolved.data.vocabulary,
            collectives,
            device=device,
            dtype=dtype,
            experts=experts,
        )
    scopes = {"dense": tensor_parallel.rank, "expert": experts.rank if experts else 0}
    load_weights(model, read_model(directory).family, directory, ranks=scopes)
    return model.requires_grad_(False).eval()
