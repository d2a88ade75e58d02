"""The README's model runs where only this package and those below it are installed."""

import json
import re
import subprocess
import sys
from importlib.metadata import distribution

import pytest


def test_the_program_of_the_readme_runs_from_the_wheel(tmp_path):
    found = distribution("pcomm-inference")
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        pytest.skip("installed in editable form: the test of code blocks runs the README itself")
    blocks = re.findall(r"^```python\n(.*?)^```", found.metadata.get_payload(), re.M | re.S)
    assert any("Engine(" in block for block in blocks)
    # What needs more than these packages is run by the test of code blocks.
    alone = [block for block in blocks if "from transformers" not in block]
    command = [sys.executable, "-W", "error", "-c", "\n".join(alone)]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
