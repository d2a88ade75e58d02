"""The pictures of `pcomm bench serving`: tokens a second by streams and by context."""

from __future__ import annotations

from collections.abc import Mapping

from core_bench.pictures import Lines

__all__ = ["PICTURES"]

_THEIRS = {
    "generate": "transformers",
    "generate, static cache": "transformers, static cache",
    "continuous batching": "transformers, generate_batch",
}


def _by_streams(rate: Mapping[tuple[str, int], float]) -> str:
    ours = rate["pcomm", 8]
    best = max(value for (label, x), value in rate.items() if x == 8 and label != "pcomm")
    return f"With 8 streams pcomm has {ours / best:.1f} times the speed of transformers"


def _by_context(rate: Mapping[tuple[str, int], float]) -> str:
    share = {
        name: rate[f"pcomm {name}", 16384] / rate[f"pcomm {name}", 128] for name in ("GDN", "GPT")
    }
    return (
        f"From 128 to 16,384 tokens GDN keeps {share['GDN']:.0%} of its speed, "
        f"and attention {share['GPT']:.0%}"
    )


PICTURES = (
    Lines(
        "serving",
        "How many tokens a second do streams get together?",
        _by_streams,
        "tokens/s",
        x="streams, one thread",
        y="tokens/s",
        pattern=r"(?P<line>.+) @ PLACE, threads 1, streams (?P<x>\d+)",
        lines={"pcomm": "pcomm", **_THEIRS},
        places=("SmolLM2-135M", "small"),
    ),
    Lines(
        "serving_context",
        "How does speed follow the context?",
        _by_context,
        "tokens/s",
        x="tokens of context, one stream",
        y="tokens/s",
        pattern=r"(?P<line>.+) @ context (?P<x>\d+)",
        lines={
            name: name
            for name in (
                "pcomm GDN",
                "transformers GDN",
                "pcomm Mamba-2",
                "transformers Mamba-2",
                "pcomm GPT",
            )
        },
    ),
)
