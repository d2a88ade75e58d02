"""The picture of `pcomm bench inference`: where a step's time goes. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from core_bench.pictures import Lines

__all__ = ["PICTURES"]

_PLACES = ("SmolLM2-135M, threads 1", "tiny, threads 1")


def _share(ms: Mapping[tuple[str, int], float]) -> str:
    rest = {
        streams: 1 - ms["its matrix products", streams] / ms["pcomm", streams] for streams in (1, 8)
    }
    return f"{rest[1]:.0%} of a step of one stream is more than matrix products, {rest[8]:.0%} of 8"


PICTURES = (
    Lines(
        "inference",
        "How much of a step are its matrix products?",
        _share,
        "ms",
        x="streams",
        y="ms a step",
        pattern=r"(?P<line>step|linears alone) @ PLACE, streams (?P<x>\d+), context 64",
        lines={"step": "pcomm", "linears alone": "its matrix products"},
        places=_PLACES,
    ),
)
