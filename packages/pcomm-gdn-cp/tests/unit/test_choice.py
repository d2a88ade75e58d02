"""The choice of kernels is visible, and the way over flash-linear-attention maps arguments right.

Its kernels want a GPU; here a module of the same names stands in, and computes with our cores.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from pcomm.core.errors import ConfigError, LayoutError, UnsupportedError
from pcomm.gdn_cp.cores import choice
from pcomm.gdn_cp.cores.choice import Kernels, choose_kernels
from pcomm.gdn_cp.cores.gated_delta import chunk_gated_delta_rule
from pcomm.gdn_cp.testing.slow_decay import delta_inputs, gradients, offsets, relative_error

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stand-in for the package; the options of each call."""
    calls = []

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
        calls.append(options)
        cu_seqlens = options["cu_seqlens"].tolist()
        assert 0 not in options["cu_seqlens"].diff()
        output, final = chunk_gated_delta_rule(
            *(x[0] for x in (options["scale"] * q, k, v, g, beta)),
            cu_seqlens=cu_seqlens,
            initial_state=options["initial_state"],
        )
        return output[None], final

    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = run
    monkeypatch.setattr(choice, "find_spec", lambda name: name == "fla" or None)
    return calls


@pytest.mark.usefixtures("fla")
def test_fla_runs_on_cuda_where_it_is_installed() -> None:
    chosen = choose_kernels(CUDA, torch.bfloat16)
    assert chosen.name == "fla"
    assert "installed, and values are torch.bfloat16 on cuda" in chosen.describe()
    assert choose_kernels(CUDA, torch.bfloat16, wanted="torch").describe().endswith("(asked for)")


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [(CPU, torch.float32, "tensors are on cpu"), (CUDA, torch.float64, "values are torch.float64")],
    ids=["cpu", "fp64"],
)
def test_ours_run_elsewhere_and_say_why(
    device: torch.device, dtype: torch.dtype, reason: str
) -> None:
    assert choose_kernels(device, dtype).describe() == f"gated delta rule: torch ({reason})"
    with pytest.raises(UnsupportedError, match=reason):
        choose_kernels(device, dtype, wanted="fla")


def test_without_fla_ours_run_on_cuda_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert "not installed" in choose_kernels(CUDA, torch.float32).describe()


def test_unknown_kernels_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'torch'"):
        choose_kernels(CPU, torch.float32, wanted="troch")


@pytest.mark.parametrize("lengths", [(70, 5), (0, 3, 0, 66, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("with_state", [False, True], ids=["zeros", "state"])
def test_both_ways_give_the_same(
    fla: list[dict[str, Any]], lengths: tuple[int, ...], with_state: bool
) -> None:
    *tokens, state = inputs = delta_inputs(lengths, dtype=torch.float32)
    options = {"cu_seqlens": offsets(lengths), "initial_state": state if with_state else None}
    ways = [Kernels(name, "for the test") for name in ("fla", "torch")]
    theirs, ours = (kernels.chunk_gated_delta_rule(*tokens, **options) for kernels in ways)
    assert len(fla) == bool(sum(lengths))
    assert relative_error(theirs, ours) == 0
    if sum(lengths):
        leaves = tuple(inputs)
        assert relative_error(gradients(theirs, leaves), gradients(ours, leaves)) == 0
        assert fla[0]["cu_seqlens_cpu"].device == CPU


@pytest.mark.usefixtures("fla")
def test_bad_offsets_are_refused_before_its_kernels_run() -> None:
    *tokens, _ = delta_inputs((8,))
    with pytest.raises(LayoutError, match="cu_seqlens ends at 7"):
        Kernels("fla", "for the test").chunk_gated_delta_rule(*tokens, cu_seqlens=(0, 7))
