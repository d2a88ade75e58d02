"""The picture of `pcomm bench ntp`: how soon others go on. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from core_bench.pictures import Bars

__all__ = ["PICTURES"]

_BARS = {
    "median @ 2 x TP4, told by the launcher": "pcomm, 8 ranks, told",
    "median @ 2 x TP2, told by the launcher": "pcomm, 4 ranks, told",
    "median @ 2 x TP2, by heartbeats alone, dead after 0.5 s": "pcomm, 4 ranks, heartbeats",
}


def _answer(seconds: Mapping[str, float]) -> str:
    told, heard = seconds["pcomm, 8 ranks, told"], seconds["pcomm, 4 ranks, heartbeats"]
    return f"After kill -9 the others go on in {told:.1f} s, by heartbeats alone in {heard:.1f} s"


PICTURES = (
    Bars(
        "ntp",
        "How soon do the others go on after a kill?",
        _answer,
        "s to the next committed step",
        "s from the kill to the next committed step",
        _BARS,
    ),
)
