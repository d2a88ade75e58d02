"""The picture of `pcomm bench nvls`: what a call costs the host. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from core_bench.pictures import Bars

__all__ = ["PICTURES"]

_BARS = {
    "all_reduce": "pcomm, all-reduce",
    "torch's all_reduce": "torch, all-reduce",
    "all_gather_into_tensor": "pcomm, all-gather",
    "torch's all-gather": "torch, all-gather",
    "reduce_scatter_tensor": "pcomm, reduce-scatter",
    "torch's reduce-scatter": "torch, reduce-scatter",
}


def _answer(us: Mapping[str, float]) -> str:
    kinds = ("all-reduce", "all-gather", "reduce-scatter")
    shares = [us[f"pcomm, {kind}"] / us[f"torch, {kind}"] for kind in kinds]
    return f"A call costs the host {min(shares):.2f} to {max(shares):.2f} of torch's time"


PICTURES = (
    Bars("nvls", "What does a call cost the host?", _answer, "us", "us of the host a call", _BARS),
)
