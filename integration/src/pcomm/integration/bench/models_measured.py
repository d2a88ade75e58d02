"""The models of a run: of real size, and of a few weights. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from pcomm.integration.bench.shapes import Shape, gated_delta_net, llama, mamba2

__all__ = ["FULL", "SMALL", "Models"]


@dataclass(frozen=True)
class Models:
    """Models by what they are for.

    Args:
        large: A Llama, for the parts `streams` and `prompt`.
        tiny: A Llama of some 200,000 parameters, for `tiny`.
        gpt: A Llama of some 10 million parameters, for `context`, `prefix` and `server`.
        delta: Gated DeltaNet of the same size, for `context`.
        mamba: Mamba-2 of the same size, for `context`.
        hybrid: Gated DeltaNet and attention, for `prefix`.
    """

    large: Shape
    tiny: Shape
    gpt: Shape
    delta: Shape
    mamba: Shape
    hybrid: Shape


def _full() -> Models:
    small = {"width": 256, "heads": 4, "mlp_width": 704, "vocabulary": 4096, "longest": 32768}
    return Models(
        llama(
            "SmolLM2-135M",
            layers=30,
            width=576,
            heads=9,
            kv_heads=3,
            mlp_width=1536,
            vocabulary=49152,
            longest=8192,
        ),
        _tiny(),
        llama("GPT", layers=12, kv_heads=2, **small),
        gated_delta_net("GDN", layers=10, **small),
        mamba2("Mamba-2", layers=21, width=256, heads=8, state=64, vocabulary=4096, chunk=64),
        gated_delta_net("hybrid", layers=12, attention_every=4, **small),
    )


def _small() -> Models:
    sizes = {"width": 32, "heads": 2, "mlp_width": 64, "vocabulary": 300, "longest": 1024}
    return Models(
        llama("small", layers=2, kv_heads=1, **sizes),
        _tiny(),
        llama("GPT", layers=2, kv_heads=1, **sizes),
        gated_delta_net("GDN", layers=2, **sizes),
        mamba2("Mamba-2", layers=2, width=32, heads=4, state=16, vocabulary=300, chunk=16),
        gated_delta_net("hybrid", layers=4, attention_every=4, **sizes),
    )


def _tiny() -> Shape:
    return llama(
        "tiny", layers=4, width=64, heads=4, kv_heads=2, mlp_width=176, vocabulary=512, longest=2048
    )


FULL = _full()
"""Models whose figures are worth keeping."""

SMALL = _small()
"""Models for a look at the output."""
