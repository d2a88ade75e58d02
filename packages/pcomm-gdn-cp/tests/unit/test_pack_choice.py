"""What packs messages is chosen by the device and the dtype, and says so."""

from __future__ import annotations

import pytest
import torch

from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.gdn_cp import GdnSpec, make_plan
from pcomm.gdn_cp.ops import backend
from pcomm.gdn_cp.ops.backend import choose_packing

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(params=[True, False], ids=["triton", "no triton"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(backend, "find_spec", lambda name: request.param or None)
    there: bool = request.param
    return there


def test_kernels_pack_on_cuda_where_triton_is_installed(installed: bool) -> None:
    found = choose_packing(CUDA, torch.bfloat16).describe()
    expected = "triton (triton is installed)" if installed else "torch (triton is not installed)"
    assert found == f"packing: {expected}"
    asked = choose_packing(CUDA, torch.bfloat16, wanted="torch")
    assert asked.describe() == "packing: torch (asked for)"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [
        (CPU, torch.float32, "tensors are on cpu"),
        (torch.device("meta"), torch.float32, "tensors are on meta"),
        (CUDA, torch.complex64, "tensors are torch.complex64"),
        (CUDA, torch.float8_e5m2, "tensors are torch.float8_e5m2"),
    ],
    ids=str,
)
def test_torch_packs_elsewhere_and_says_why(
    device: torch.device, dtype: torch.dtype, reason: str
) -> None:
    assert choose_packing(device, dtype).describe() == f"packing: torch ({reason})"
    with pytest.raises(UnsupportedError, match=f"{reason}(?s:.*)2, 4 or 8 bytes"):
        choose_packing(device, dtype, wanted="triton")
    with pytest.raises(ConfigError, match="Did you mean 'triton'"):
        choose_packing(device, dtype, wanted="trition")


def test_a_plan_says_what_packs(installed: bool) -> None:
    on_cuda = choose_packing(CUDA, torch.bfloat16)
    assert on_cuda.name == ("triton" if installed else "torch")
    line = f"packed by torch on the CPU, by {on_cuda.name} on CUDA ({on_cuda.reason})"
    spec = GdnSpec(2, 4, 8, 8)
    assert line in make_plan((0, 64), (0, 2), spec, strategy="heads").describe()
    for size, strategy in ((1, "heads"), (2, "gather")):
        plan = make_plan((0, 64), (0, size), spec, strategy=strategy)  # type: ignore[arg-type]
        assert "packed by" not in plan.describe()
