"""The GDN and Mamba-2 mixers against transformers, sequence by sequence, and while decoding.

Decays are made slow first: with the first values of a new model the state is gone after a few
tokens, and a mixer without any memory across chunks would pass.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from integration_support.huggingface_directories import small_model
from pcomm.gdn_cp.ops import Kernels
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, ModelConfig
from pcomm.integration.huggingface import load_model
from pcomm.integration.models.forward_context import Context
from pcomm.integration.models.initialisation import initialise
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.parallelize import plan_sequences

pytest.importorskip("transformers", reason="transformers is the oracle here")

LENGTHS = (70, 3, 1, 130)
TOLERANCE = 1e-4
FAMILIES = {"qwen3_next": "linear_attn", "mamba2": "mixer"}


def packed_inputs(width: int) -> tuple[Tensor, tuple[int, ...]]:
    borders = [sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)]
    generator = torch.Generator().manual_seed(3)
    return torch.randn(borders[-1], width, generator=generator), tuple(borders)


def compare(family: str, folder: Path) -> tuple[float, float]:
    """Largest difference of the output and of the gradient of the input, in the first layer."""
    whole = small_model(family)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in whole.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            parameter.data = -3 + noise
        elif name.endswith("dt_bias"):
            parameter.data = -1.5 + 0.3 * noise
    whole.save_pretrained(folder)  # type: ignore[operator]
    model = load_model(folder)
    theirs = getattr(whole.base_model.layers[0], FAMILIES[family])
    x, borders = packed_inputs(model.config.width)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(4))

    def run(function: object) -> tuple[Tensor, Tensor]:
        mine = x.clone().requires_grad_()
        y = function(mine)  # type: ignore[operator]
        return y.detach(), torch.autograd.grad(y, mine, upstream)[0]

    def one_by_one(x: Tensor) -> Tensor:
        found = [theirs(part.unsqueeze(0)) for part in x.split(LENGTHS)]
        return torch.cat(
            [(y[0] if isinstance(y, tuple) else y).view(-1, x.shape[1]) for y in found]
        )

    context = Context(plan_sequences(model, borders), None)
    y, gradient = run(lambda x: model.blocks[0].mixer(x, context))
    expected, their_gradient = run(one_by_one)
    return float((y - expected).abs().max()), float((gradient - their_gradient).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_output_and_gradient_equal_transformers(family, tmp_path):
    output, gradient = compare(family, tmp_path)
    assert output < TOLERANCE
    assert gradient < TOLERANCE


BREAKS = {"qwen3_next": "chunk_gated_delta_rule", "mamba2": "chunk_mamba2_ssd"}


@pytest.mark.parametrize("family", BREAKS)
def test_a_state_that_leaks_between_documents_is_seen(family, tmp_path, monkeypatch):
    whole = getattr(Kernels, BREAKS[family])

    def leaking(*inputs: Tensor, cu_seqlens: tuple[int, ...], **options: object) -> object:
        return whole(*inputs, cu_seqlens=(0, cu_seqlens[-1]), **options)

    monkeypatch.setattr(Kernels, BREAKS[family], leaking)
    assert compare(family, tmp_path)[0] > 100 * TOLERANCE


def test_the_same_seed_gives_the_same_mixers_whatever_else_is_there():
    found = []
    for layers in (2, 4):
        shape = ModelConfig(pattern="GM", layers=layers, width=48, heads=4, mamba_groups=2)
        model = LanguageModel(validate(Config(model=shape), 1).model, 61)
        initialise(model, dataclasses.replace(model.config, layers=2), seed=5)
        found.append({n: p for n, p in model.named_parameters() if n.startswith("blocks.1.")})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert float(found[0]["blocks.1.mixer.dt_bias"].detach().max()) < 0
