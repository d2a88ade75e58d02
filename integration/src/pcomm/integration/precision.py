"""In which precision the model computes, and where; parameters that are trained stay in fp32."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn import functional as F

from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pcomm.fsdp import Precision, ReshardPolicy, Roles, Scope
from pcomm.integration.config.sections import Dtype
from pcomm.integration.models.experts import Experts

__all__ = ["autocast", "faster_dtype", "names_used_in_bf16", "precision_of", "scope_in_fp32"]
__all__ += ["tell_device"]

_log = logging.getLogger("pcomm.train")

# Their products are what autocast lowers, with all their parameters.
_LOWERED = (ColumnParallelLinear, RowParallelLinear, Experts)

# A gradient is rounded once, by the product it comes from. Sums over ranks and micro-batches in
# bf16 would round it again for each of them, and lose what is small beside the sum so far.
_BF16 = Precision(torch.bfloat16, torch.float32, casts_inputs=False)
_FULL = Precision()

# Autocast also rounds around its products, so these have to be faster by more than a little.
_WORTH = 0.8
# Rows of the product that is timed, its largest width, and how often.
_ROWS, _WIDTH, _TURNS = 512, 1024, 5


def faster_dtype(device: torch.device, width: int) -> tuple[Dtype, str]:
    """The format in which a model is trained faster, and why in a few words. Local; under a second.

    Processors are asked for AMX or AVX512-BF16, and then both formats are timed: the instructions
    may be there and not be used. Without them bf16 is computed by way of fp32.

    Args:
        device: Device of the run.
        width: Width of the model.
    """
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return ("bf16", "the GPU has it") if has_bf16 else ("fp32", "the GPU has no bf16")
    # oneDNN's own answer is yes for any AVX512.
    found = {"AMX": torch.cpu._is_amx_tile_supported, "AVX512-BF16": _has_avx512_bf16}
    names = [name for name, is_there in found.items() if is_there()]
    if not names:
        return "fp32", "the processor has no bf16"
    share = _share_of_bf16(min(width, _WIDTH))
    told = f"{' and '.join(names)}, with which a product takes {share:.2f} of its time in fp32"
    return ("bf16" if share < _WORTH else "fp32"), told


def _has_avx512_bf16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported())


def _share_of_bf16(width: int) -> float:
    """Time of a product under autocast over that in fp32, each in its fastest turn. Local."""
    x, weight = torch.ones(_ROWS, width), torch.ones(3 * width, width)
    fastest: dict[Dtype, float] = {}
    formats: tuple[Dtype, ...] = ("fp32", "bf16")
    for _ in range(_TURNS):
        for dtype in formats:
            start = time.perf_counter()
            with torch.inference_mode(), autocast(dtype, x.device):
                F.linear(x, weight)
            taken = time.perf_counter() - start
            fastest[dtype] = min(taken, fastest.get(dtype, taken))
    return fastest["bf16"] / fastest["fp32"]


def autocast(dtype: str, device: torch.device) -> AbstractContextManager[object]:
    """A context for forward: bf16 where that is safe (`"bf16"`), or nothing (`"fp32"`)."""
    if dtype == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def precision_of(dtype: str, roles: Roles) -> Precision:
    """Formats of the parameters that `roles` share; where none is gathered, autocast alone rounds.

    Every result is the one that autocast gives with whole parameters, but for the order of sums.

    Args:
        dtype: `"fp32"` or `"bf16"`, in which forward computes under `autocast`.
        roles: The groups of the parameters.
    """
    return _BF16 if dtype == "bf16" and roles.gather.size > 1 else _FULL


def scope_in_fp32(model: nn.Module, roles: Roles, dtype: str, stage: int) -> dict[str, Scope]:
    """The scope `"fp32"` of what forward reads in fp32, where the rest is gathered in bf16. Local.

    These are a few vectors of each block and the embedding, so they are gathered once a step.

    Args:
        model: The model, before it is sharded.
        roles: The groups of its dense parameters.
        dtype: `"fp32"` or `"bf16"`, in which forward computes under `autocast`.
        stage: The ZeRO stage of the rest: 1, 2 or 3.

    Returns:
        The scope by its name; nothing where all parameters are gathered in fp32, or not at all.
    """
    if precision_of(dtype, roles) is _FULL:
        return {}
    rounded = names_used_in_bf16(model)
    kept = ReshardPolicy.zero1() if stage == 1 else ReshardPolicy.zero2()
    return {"fp32": Scope(lambda n, _: n not in rounded, roles, 1, kept, precision=_FULL)}


def names_used_in_bf16(model: nn.Module) -> frozenset[str]:
    """Parameters of which forward reads nothing but the value rounded to bf16, under `autocast`.

    They can be sent rounded, and nothing changes. They are the matrices of linear layers and of
    experts. Not so the embedding, which begins the residual stream and whose gradient is a sum over
    tokens, a head that is tied to it, the router, norms, convolutions, and what recurrent mixers
    have one of for each head (decays, time steps): all of these are computed in fp32. Local.
    """
    lowered, kept = set[nn.Parameter](), set[nn.Parameter]()
    for module in model.modules():
        own = module.parameters(recurse=False)
        (lowered if isinstance(module, _LOWERED) else kept).update(own)
    return frozenset(name for name, p in model.named_parameters() if p in lowered - kept)


def tell_device(dtype: str, why: str, num_ranks: int, device: torch.device, *, rank: int) -> None:
    """Log on what a run computes, in one line, and what GPUs are not used for. Local.

    Args:
        dtype: Format that the run computes in.
        why: The reason, where `train.dtype = "auto"` chose it; else empty.
        num_ranks: Number of ranks.
        device: Device of this rank.
        rank: This rank.
    """
    name, between = "the CPU", "gloo"
    if device.type == "cuda":
        name, between = f"{torch.cuda.get_device_name(device)} ({device})", "nccl"
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks, {between} between them,"
    reason = f' (train.dtype = "auto": {why})' if why else ""
    _log.info("%s on %s, %s%s", ranks, name, dtype, reason)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus and device.type == "cpu" and rank == 0:
        _log.warning(
            "this run computes on the CPU, and the %d GPUs of this machine have no work. To use "
            "them run `torchrun --nproc-per-node %d --no-python pcomm train` with the other "
            "options, without --ranks and --resilient",
            num_gpus,
            num_gpus,
        )
    if device.type == "cuda" and dtype == "fp32" and not why and rank == 0:
        _log.warning(
            "fp32 keeps products off the tensor cores of the GPU, and attention off flash kernels; "
            'train.dtype = "auto" takes bf16 where the GPU has it'
        )
