"""What one layer of Qwen3-Next sends in each form, by arithmetic: nothing is measured.

The packs are those of `pcomm bench gdn-cp`, which times an eighth of these widths in fp32. Here
activations are bf16, and states fp32. MB of the busiest rank, forward and backward.

python packages/pcomm-gdn-cp/benchmarks/full_width_bytes.py --csv docs/benchmarks/gdn_cp.csv
"""

from __future__ import annotations

from pcomm.core.testing.timing import Row, run_benchmark
from pcomm.gdn_cp.bench.sent_bytes import COUNTED, QWEN3_NEXT, sent_bytes
from pcomm.gdn_cp.bench.settings import Settings

NAME = "full_width_bytes"


def measure() -> list[Row]:
    settings, rows = Settings(), []
    for size in settings.ranks:
        for pack in settings.packs():
            if not pack.is_random:
                continue
            place = f"cp {size}, {pack.label}"
            sent = {form: sent_bytes(form, QWEN3_NEXT, pack.cu_seqlens, size) for form in COUNTED}
            for form, count in sent.items():
                is_ours = form != "fused"
                rows.append(
                    Row(
                        NAME,
                        f"{form} @ {place}",
                        round(count / 1e6, 3),
                        "MB by arithmetic",
                        f"fused @ {place}" if is_ours else "",
                        round(count / sent["fused"], 3) if is_ours else None,
                        rounds=0,
                    )
                )
    return rows


if __name__ == "__main__":
    run_benchmark(__doc__, measure)
