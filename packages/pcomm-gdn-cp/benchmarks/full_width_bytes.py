"""What one layer of Qwen3-Next sends in each form, by arithmetic: nothing is measured.

The packs are those of `pcomm bench gdn-cp`, which times an eighth of these widths in fp32. Here
activations are bf16, and states fp32. MB of the busiest rank, forward and backward.

python packages/pcomm-gdn-cp/benchmarks/full_width_bytes.py --csv docs/benchmarks/gdn_cp.csv
"""

from __future__ import annotations

import sys
from pathlib import Path

# The runner of benchmarks is in no wheel.
sys.path.append(str(Path(__file__).parents[2] / "pcomm-core" / "benchmarks"))

from core_bench.rows import Row, row
from core_bench.runner import run_benchmark
from gdn_cp_bench.sent_bytes import COUNTED, QWEN3_NEXT, sent_bytes
from gdn_cp_bench.settings import Settings

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
                beside = (f"fused @ {place}", count / sent["fused"]) if form != "fused" else None
                case, unit = f"{form} @ {place}", "MB by arithmetic"
                rows.append(row(NAME, case, count / 1e6, unit, 0, beside=beside))
    return rows


if __name__ == "__main__":
    run_benchmark(__doc__, measure)
