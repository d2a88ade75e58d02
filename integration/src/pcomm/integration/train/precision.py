"""In which precision the model computes; the parameters that are trained stay in fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pcomm.integration.models.moe.experts import Experts

__all__ = ["autocast", "names_used_in_bf16"]

# Their products are what autocast lowers, with all their parameters.
_LOWERED = (ColumnParallelLinear, RowParallelLinear, Experts)


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """A context for forward: bf16 where that is safe (`"bf16"`), or nothing (`"fp32"`)."""
    if dtype == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def names_used_in_bf16(model: nn.Module) -> frozenset[str]:
    """Parameters of which forward reads nothing but the value rounded to bf16, under `autocast`.

    Whoever sends these sends them rounded, and nothing changes. They are the matrices of linear
    layers and of experts. Not so the embedding, which begins the residual stream and whose gradient
    is a sum over tokens, a head that is tied to it, the router, norms, convolutions, and what
    recurrent mixers have one of for each head (decays, time steps): all of these are computed in
    fp32. Local.
    """
    lowered, kept = set[nn.Parameter](), set[nn.Parameter]()
    for module in model.modules():
        own = module.parameters(recurse=False)
        (lowered if isinstance(module, _LOWERED) else kept).update(own)
    return frozenset(name for name, p in model.named_parameters() if p in lowered - kept)
