"""A call outside of graphs does not import Dynamo, nor packing by torch Triton: seconds each."""

import subprocess
import sys
import textwrap

PROGRAM = """
    import sys

    import torch

    from pcomm.gdn_cp.ops.backend import choose_packing
    from pcomm.gdn_cp.ops.entry import graph_break

    @graph_break
    def twice(x):
        "Doubles."
        return 2 * x

    x = torch.ones(4, 2)
    choose_packing(x.device, x.dtype).packing.take_rows([x, x], None)
    late = [name for name in ("torch._dynamo", "triton") if name in sys.modules]
    print(twice(4), twice.__doc__, late)
"""


def test_calls_import_no_compiler() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.stdout == "8 Doubles. []\n", finished.stderr
