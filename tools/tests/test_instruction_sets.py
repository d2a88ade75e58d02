"""Tests whose results depend on instructions, under each set that this processor can be kept to."""

from __future__ import annotations

import os
import re
import sys

import pytest
import torch

from repository import ROOT

FILES = (
    "packages/pcomm-inference/tests/unit/test_packed_weight.py",
    "packages/pcomm-inference/tests/unit/test_paged_attention.py",
    "integration/tests/unit/test_model_step.py",
)
# The largest sizes take half of the time, and the same kernels.
SMALL = "not (11008 or GGGA or 2048-1536)"
# From few instructions to many: what oneDNN and ATen call a set, and whether it is there.
SETS = {
    "AVX2": ("AVX2", "avx2", torch.cpu._is_avx2_supported()),
    "AVX-512": ("AVX512_CORE", "avx512", torch.cpu._is_avx512_supported()),
    "AVX-512 BF16": ("AVX512_CORE_BF16", "avx512", torch.cpu._is_avx512_bf16_supported()),
    "AMX": ("AVX512_CORE_AMX", "avx512", torch.cpu._is_amx_tile_supported()),
}
OWN = max((name for name in SETS if SETS[name][2]), key=list(SETS).index, default="")


# A set between two others, which the long tests run.
LONG = ("AVX-512 BF16",)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.soak] * (one in LONG)) for one in SETS]
)
def test_tests_of_bits_hold_with_fewer_instructions(name, programs):
    """In a process of its own each, since both libraries choose their kernels once."""
    onednn, aten, is_there = SETS[name]
    if not is_there:
        pytest.skip(f"this processor has no {name}")
    if name == OWN:
        pytest.skip(f"{name} is all that this processor has: the suite itself runs with it")
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": aten}
    words = ["-q", "-p", "no:cacheprovider", "-m", "instructions", "-k", SMALL, *FILES]
    ended = programs.run(sys.executable, "-m", "pytest", *words, env=env, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr
    found = re.search(r"(\d+) passed", ended.stdout)
    assert found is not None
    assert int(found[1]) >= 12, ended.stdout
