"""Calls outside of graphs do not import Dynamo, which takes seconds."""

import subprocess
import sys
import textwrap

PROGRAM = """
    import sys
    from pcomm.gdn_cp.graph_breaks import outside_graphs

    @outside_graphs
    def twice(x):
        "Doubles."
        return 2 * x

    assert twice(4) == 8
    assert twice.__doc__ == "Doubles."
    assert "torch._dynamo" not in sys.modules
"""


def test_a_call_imports_no_compiler() -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], check=True)
