"""`pcomm bench nvls`, which runs in a checkout alone."""

import sys
from pathlib import Path

# Devices that are not there, compiled kernels and virtual ranks are the support of the tests, too.
_TESTS = str(Path(__file__).parents[2] / "tests")
if _TESTS not in sys.path:
    sys.path.append(_TESTS)
