"""`pcomm bench nvls`, which runs in a checkout alone."""

import sys
from pathlib import Path

# Devices that are not there, compiled kernels and virtual ranks are the support of the tests, too.
_PACKAGES = Path(__file__).parents[3]
for _tests in (_PACKAGES / "pcomm-nvls" / "tests", _PACKAGES / "pcomm-core" / "tests"):
    if str(_tests) not in sys.path:
        sys.path.append(str(_tests))
