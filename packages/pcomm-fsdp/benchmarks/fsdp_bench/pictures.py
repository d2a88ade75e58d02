"""The picture of `pcomm bench fsdp`: a step beside FSDP2's. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from core_bench.pictures import Bars
from fsdp_bench.settings import FSDP2, TUNED, TUNED_TWO_RAILS, TWO, TWO_RAILS

__all__ = ["PICTURES"]

_BARS = {
    FSDP2: "FSDP2 as shipped",
    TUNED: "FSDP2 fully tuned",
    TWO: "pcomm",
    TUNED_TWO_RAILS: "FSDP2 fully tuned, 2 rails",
    TWO_RAILS: "pcomm, 2 rails",
}


def _answer(ms: Mapping[str, float]) -> str:
    one = ms["pcomm"] / ms["FSDP2 fully tuned"]
    two = ms["pcomm, 2 rails"] / ms["FSDP2 fully tuned, 2 rails"]
    return f"A sharded step takes {one:.2f} of fully tuned FSDP2's time, on two rails {two:.2f}"


PICTURES = (
    Bars(
        "fsdp",
        "How long does a sharded step take beside FSDP2's?",
        _answer,
        "ms",
        "ms, forward and backward",
        _BARS,
        place="4 ranks, transformer",
    ),
)
