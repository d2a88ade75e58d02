"""A training step on one GPU against the CPU; never run yet, because no GPU was at hand."""

from __future__ import annotations

import pytest
import torch

from pcomm.core.testing import assert_as_accurate
from pcomm.integration import recipes
from pcomm.integration.config.rules import validate
from pcomm.integration.models.initialisation import initialise
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.parallelize import plan_sequences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def gradient(device: str, dtype: torch.dtype) -> torch.Tensor:
    """Of the embedding, for one packed buffer."""
    config = validate(recipes.tiny(), 1)
    model = LanguageModel(config.model, config.data.vocabulary, device=device, dtype=dtype)
    initialise(model, config.model, seed=0)
    tokens = torch.arange(24, device=device) * 7 % config.data.vocabulary
    model.token_losses(tokens, tokens.roll(-1), plan_sequences(model, (0, 10, 24))).sum().backward()
    found = model.embedding.weight.grad
    assert found is not None
    return found.cpu()


def test_gradients_on_a_gpu_are_as_accurate_as_on_the_cpu():
    plain = gradient("cpu", torch.float32)
    exact = gradient("cpu", torch.float64)
    # TF32 is off by default, so both round at fp32; the factor is for the other order of sums.
    assert_as_accurate(gradient("cuda", torch.float32), plain, exact, factor=8.0, num_terms=32)
