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

    print(twice(4), twice.__doc__, "torch._dynamo" in sys.modules)
"""


def test_a_call_imports_no_compiler() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.stdout == "8 Doubles. False\n", finished.stderr
