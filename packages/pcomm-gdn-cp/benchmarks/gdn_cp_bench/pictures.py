"""The picture of `pcomm bench gdn-cp`: the exchange by strategy. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from core_bench.pictures import Lines

__all__ = ["PICTURES"]

_FUSED, _DOCS = "Megatron-LM PR 4913", "pcomm, docs"


def _answer(ms: Mapping[tuple[str, int], float]) -> str:
    # `--quick` has fewer.
    number = max((x for name, x in ms if name == _DOCS and x <= 64), default=64)
    share = ms[_DOCS, number] / ms[_FUSED, number]
    return (
        f"With {number} documents the strategy docs takes {share:.2f} of the time of Megatron-LM's "
        "fused exchange"
    )


PICTURES = (
    Lines(
        "gdn_cp",
        "How long does the exchange of a layer take?",
        _answer,
        "ms",
        x="documents in the pack, lengths at random",
        y="ms, forward and backward",
        pattern=r"(?P<line>.+) @ cp PLACE, (?P<x>\d+) (random sequences|sequence)",
        lines={
            "docs": _DOCS,
            "heads": "pcomm, heads",
            "state": "pcomm, state",
            "gather": "pcomm, gather",
            "fused": _FUSED,
            "loop": "one by one",
        },
        places=("4", "2"),
        is_log=True,
    ),
)
