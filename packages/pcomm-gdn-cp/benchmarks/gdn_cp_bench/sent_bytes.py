"""What the forms of the exchange send, by arithmetic: for shapes that this machine cannot hold.

The times of `pcomm bench gdn-cp` are of an eighth of Qwen3-Next's widths, in fp32. States do not
shrink with widths as activations do, and stay in fp32 where these are bf16, so the bytes of
`state` beside the others' are not those of the whole shape. These are.
"""

# t tokens of a rank, W columns of all sections and z

from __future__ import annotations

from dataclasses import dataclass

from pcomm.gdn_cp.plan import make_plan
from pcomm.gdn_cp.specs import GdnSpec

COUNTED = ("fused", "heads", "docs", "state", "gather")


@dataclass(frozen=True)
class LayerShape:
    """One Gated DeltaNet layer.

    Args:
        spec: The mixer.
        hidden_dim: Width of hidden states.
        element_bytes: Bytes of an element of activations; states are fp32.
    """

    spec: GdnSpec
    hidden_dim: int
    element_bytes: int


QWEN3_NEXT = LayerShape(GdnSpec(16, 32, 128, 128), hidden_dim=2048, element_bytes=2)


def sent_bytes(form: str, shape: LayerShape, cu_seqlens: tuple[int, ...], size: int) -> int:
    """Bytes that the busiest rank sends for one layer, forward and backward. Local.

    Args:
        form: One of `COUNTED`.
        shape: The layer.
        cu_seqlens: Offsets of the pack, whose tokens lie in zigzag.
        size: Number of ranks.
    """
    spec = shape.spec
    if form == "fused":
        # All sections, z among them, and the output back; all but what stays on the rank.
        width = sum(s.width for s in spec.sections) + 2 * spec.output.width
        return 2 * cu_seqlens[-1] // size * width * shape.element_bytes * (size - 1) // size
    options = {"hidden_dim": shape.hidden_dim, "element_bytes": shape.element_bytes}
    plans = (
        make_plan(cu_seqlens, (rank, size), spec, strategy=form, **options)  # type: ignore[arg-type]
        for rank in range(size)
    )
    return max(plan.traffic(spec).sent_bytes for plan in plans)
