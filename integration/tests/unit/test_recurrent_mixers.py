"""The GDN and Mamba-2 mixers against transformers, sequence by sequence, and while decoding.

Decays are made slow first: with the first values of a new model the state is gone after a few
tokens, and a mixer without any memory across chunks would pass.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from pcomm.gdn_cp.ops import Kernels
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, ModelConfig
from pcomm.integration.models import gated_delta_net
from pcomm.integration.models.forward_context import Context
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.parallelize import plan_sequences

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")

LENGTHS = (70, 3, 1, 130)
TOLERANCE = 1e-4


def model_of(pattern: str) -> LanguageModel:
    shape = ModelConfig(
        pattern=pattern,
        layers=len(pattern),
        width=48,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp_width=64,
        mamba_groups=2,
        mamba_state_dim=24,
    )
    config = validate(Config(model=shape), 1)
    torch.manual_seed(1)
    model = LanguageModel(config.model, 61)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("a_log"):
            parameter.data = -3 + noise
        elif name.endswith("dt_bias"):
            parameter.data = -1.5 + 0.3 * noise
        elif parameter.dim() == 1:
            parameter.data = 1 + 0.1 * noise
        else:
            parameter.data = noise * (0.3 if "embedding" in name else parameter.shape[1] ** -0.5)
    return model


def theirs_of(ours: nn.Module, config: ModelConfig) -> nn.Module:
    """The layer of transformers with the weights of `ours`."""
    if isinstance(ours, gated_delta_net.GatedDeltaNet):
        return their_gated_delta_net(ours, config)
    return their_mamba2(ours, config)


def their_gated_delta_net(ours: nn.Module, config: ModelConfig) -> nn.Module:
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    settings = transformers.Qwen3NextConfig(
        hidden_size=config.width,
        linear_num_key_heads=config.gdn_key_heads,
        linear_num_value_heads=config.gdn_value_heads,
        linear_key_head_dim=config.gdn_key_dim,
        linear_value_head_dim=config.gdn_value_dim,
        linear_conv_kernel_dim=config.conv_width,
        rms_norm_eps=config.norm_eps,
        num_hidden_layers=1,
    )
    layer = qwen.Qwen3NextGatedDeltaNet(settings, 0)
    q, k, v, z, b, a = ours.input.weight.split(ours.sizes)
    num_groups = config.gdn_key_heads
    # They keep the rows of a key head together: q, k, then its value heads' v, then their z.
    per_group = [part.unflatten(0, (num_groups, -1)) for part in (q, k, v, z)]
    state = {
        "in_proj_qkvz.weight": torch.cat(per_group, 1).flatten(0, 1),
        "in_proj_ba.weight": torch.cat(
            [part.unflatten(0, (num_groups, -1)) for part in (b, a)], 1
        ).flatten(0, 1),
        "conv1d.weight": ours.conv_weight.unsqueeze(1),
        "A_log": ours.a_log,
        "dt_bias": ours.dt_bias,
        "norm.weight": ours.norm_weight,
        "out_proj.weight": ours.output.weight,
    }
    layer.load_state_dict(state)
    return layer.eval()


def their_mamba2(ours: nn.Module, config: ModelConfig) -> nn.Module:
    from transformers.models.nemotron_h import modeling_nemotron_h as nemotron

    settings = transformers.NemotronHConfig(
        hidden_size=config.width,
        mamba_num_heads=config.mamba_heads,
        mamba_head_dim=config.mamba_head_dim,
        n_groups=config.mamba_groups,
        ssm_state_size=config.mamba_state_dim,
        conv_kernel=config.conv_width,
        layer_norm_epsilon=config.norm_eps,
        use_conv_bias=True,
        use_bias=False,
        chunk_size=32,
    )
    layer = nemotron.NemotronHMamba2Mixer(settings, 0)
    state = {
        "in_proj.weight": ours.input.weight,
        "conv1d.weight": ours.conv_weight.unsqueeze(1),
        "conv1d.bias": ours.conv_bias,
        "A_log": ours.a_log,
        "dt_bias": ours.dt_bias,
        "D": ours.d,
        "norm.weight": ours.norm_weight,
        "out_proj.weight": ours.output.weight,
    }
    layer.load_state_dict(state)
    return layer.eval()


def packed_inputs(width: int) -> tuple[Tensor, tuple[int, ...]]:
    borders = [sum(LENGTHS[:n]) for n in range(len(LENGTHS) + 1)]
    generator = torch.Generator().manual_seed(3)
    return torch.randn(borders[-1], width, generator=generator), tuple(borders)


def compare(pattern: str) -> tuple[float, float]:
    """Largest difference of the output and of the gradient of the input."""
    model = model_of(pattern)
    mixer = model.blocks[0].mixer
    theirs = theirs_of(mixer, model.config)
    x, borders = packed_inputs(model.config.width)
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(4))

    def run(function: object) -> tuple[Tensor, Tensor]:
        mine = x.clone().requires_grad_()
        y = function(mine)  # type: ignore[operator]
        return y.detach(), torch.autograd.grad(y, mine, upstream)[0]

    context = Context(plan_sequences(model, borders), None)
    y, gradient = run(lambda x: mixer(x, context))
    expected, their_gradient = run(
        lambda x: torch.cat([theirs(part.unsqueeze(0))[0] for part in x.split(LENGTHS)])
    )
    return float((y - expected).abs().max()), float((gradient - their_gradient).abs().max())


@pytest.mark.parametrize("pattern", ["G", "M"])
def test_output_and_gradient_equal_transformers(pattern):
    output, gradient = compare(pattern)
    assert output < TOLERANCE
    assert gradient < TOLERANCE


BREAKS = {"G": "chunk_gated_delta_rule", "M": "chunk_mamba2_ssd"}


@pytest.mark.parametrize("pattern", BREAKS)
def test_a_state_that_leaks_between_documents_is_seen(pattern, monkeypatch):
    whole = getattr(Kernels, BREAKS[pattern])

    def leaking(*inputs: Tensor, cu_seqlens: tuple[int, ...], **options: object) -> object:
        return whole(*inputs, cu_seqlens=(0, cu_seqlens[-1]), **options)

    monkeypatch.setattr(Kernels, BREAKS[pattern], leaking)
    assert compare(pattern)[0] > 100 * TOLERANCE


def test_the_same_seed_gives_the_same_mixers_whatever_else_is_there():
    from pcomm.integration.models.initialisation import initialise

    found = []
    for layers in (2, 4):
        model = model_of("GM" * (layers // 2))
        initialise(model, dataclasses.replace(model.config, layers=2), seed=5)
        found.append({n: p for n, p in model.named_parameters() if n.startswith("blocks.1.")})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert float(found[0]["blocks.1.mixer.dt_bias"].detach().max()) < 0
