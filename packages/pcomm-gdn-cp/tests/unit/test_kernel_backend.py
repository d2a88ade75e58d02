"""The choice of kernels is visible, and the way over flash-linear-attention maps arguments right.

Its kernels want a GPU. Here functions with the names and parameters of fla-core 0.6.0 stand in:
the gated delta rule computes with our core, simple gated linear attention token by token.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from core_support.kernel_launches import recorded
from gdn_cp_bench.slow_decay import (
    delta_inputs,
    gradients,
    offsets,
    relative_error,
    ssd_inputs,
)
from pcomm.core.errors import ConfigError, LayoutError, UnsupportedError
from pcomm.gdn_cp.ops import backend
from pcomm.gdn_cp.ops.backend import Kernels, choose_kernels
from pcomm.gdn_cp.ops.gated_delta_rule import DeltaChunks, chunk_gated_delta_rule
from pcomm.gdn_cp.ops.mamba2_ssd import SsdChunks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OPERATIONS = {"gated_delta_rule": "chunk_gated_delta_rule", "simple_gla": "chunk_simple_gla"}
FLA, TORCH = Kernels("fla", "for the test"), Kernels("torch", "for the test")


def check_call(
    q: Tensor, k: Tensor, v: Tensor, gates: Any, state: Any, cu_seqlens: Any, cu_seqlens_cpu: Any
) -> list[int]:
    """What the kernels take for granted; the offsets."""
    assert q.dtype == k.dtype == v.dtype
    assert q.shape == k.shape
    assert all(gate.shape == v.shape[:-1] and gate.dtype == torch.float32 for gate in gates)
    num_sequences = len(cu_seqlens) - 1
    assert state.shape == (num_sequences, v.shape[2], k.shape[3], v.shape[3])
    assert cu_seqlens_cpu.device == CPU
    assert torch.equal(cu_seqlens.cpu(), cu_seqlens_cpu)
    assert 0 not in cu_seqlens.diff()
    return cu_seqlens.tolist()


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-in for the package; the operations that were called."""
    calls = []

    def delta(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
        cu_seqlens=None, cu_seqlens_cpu=None,
    ):  # fmt: skip
        calls.append("gated_delta_rule")
        cuts = check_call(q, k, v, (g, beta), initial_state, cu_seqlens, cu_seqlens_cpu)
        scale = k.shape[-1] ** -0.5 if scale is None else scale
        output, final = chunk_gated_delta_rule(
            *(x[0] for x in (scale * q, k, v, g, beta)),
            cu_seqlens=cuts,
            initial_state=initial_state,
        )
        return output[None], final if output_final_state else None

    def simple(
        q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False,
        state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
    ):  # fmt: skip
        calls.append("simple_gla")
        # One head of queries and keys for each of the values: it has no groups.
        assert q.shape[2] == v.shape[2]
        assert g_gamma is None
        assert not state_v_first
        cuts = check_call(q, k, v, (g,), initial_state, cu_seqlens, cu_seqlens_cpu)
        scale = k.shape[-1] ** -0.5 if scale is None else scale
        outputs, states = [], []
        q, k, values = (x[0].float() for x in (q, k, v))
        decay = g[0].exp()
        for state, (start, stop) in zip(initial_state, pairwise(cuts), strict=True):
            for t in range(start, stop):
                written = k[t, :, :, None] * values[t, :, None, :]
                state = decay[t, :, None, None] * state + written
                outputs.append(scale * (q[t, :, :, None] * state).sum(1))
            states.append(state)
        output = torch.stack(outputs).to(v.dtype)[None]
        return output, torch.stack(states) if output_final_state else None

    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.ops", ModuleType("fla.ops"))
    for (folder, name), run in zip(OPERATIONS.items(), (delta, simple), strict=True):
        module = ModuleType(f"fla.ops.{folder}")
        setattr(module, name, run)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(backend, "find_spec", lambda name: name == "fla" or None)
    return calls


@pytest.mark.usefixtures("fla")
def test_kernels_are_chosen_by_device_and_dtype_and_say_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert choose_kernels(CUDA, torch.bfloat16).describe() == (
        "gated delta rule: fla chunk_gated_delta_rule, state space: fla chunk_simple_gla "
        "(installed, and values are torch.bfloat16 on cuda)"
    )
    assert choose_kernels(CUDA, torch.bfloat16, wanted="torch").describe().endswith("(asked for)")
    for device, dtype, reason in (
        (CPU, torch.float32, "tensors are on cpu"),
        (CUDA, torch.float64, "values are torch.float64"),
    ):
        said = f"gated delta rule: torch, state space: torch ({reason})"
        assert choose_kernels(device, dtype).describe() == said
        with pytest.raises(UnsupportedError, match=reason):
            choose_kernels(device, dtype, wanted="fla")
    with pytest.raises(ConfigError, match="Did you mean 'torch'"):
        choose_kernels(CPU, torch.float32, wanted="troch")
    monkeypatch.setattr(backend, "find_spec", lambda name: name == "triton" or None)
    without = "flash-linear-attention is not installed"
    assert choose_kernels(CUDA, torch.float32).describe() == (
        f"gated delta rule: triton, state space: triton ({without})"
    )
    assert choose_kernels(CUDA, torch.float32, wanted="triton").describe().endswith("(asked for)")
    for device, dtype in ((CPU, torch.float32), (CUDA, torch.float64)):
        assert choose_kernels(device, dtype).name == "torch"
        with pytest.raises(UnsupportedError, match=r"wanted='triton'(?s:.*)pcomm-gdn-cp\[triton\]"):
            choose_kernels(device, dtype, wanted="triton")
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert choose_kernels(CUDA, torch.float32).describe().endswith(f"torch ({without})")
    with pytest.raises(UnsupportedError, match="triton is not installed"):
        choose_kernels(CUDA, torch.float32, wanted="triton")


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize(
    ("major", "triton", "name"),
    [(9, "3.6.0", "triton"), (9, "3.7.1", "fla"), (9, "3.3.1", "fla"), (10, "3.6.0", "fla")],
    ids=str,
)
def test_a_triton_that_fla_refuses_on_hopper_leaves_it_out(
    monkeypatch: pytest.MonkeyPatch, major: int, triton: str, name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    module = ModuleType("triton")
    module.__version__ = triton
    monkeypatch.setitem(sys.modules, "triton", module)
    monkeypatch.setattr(backend, "find_spec", lambda name: name in ("fla", "triton") or None)
    chosen = choose_kernels(CUDA, torch.bfloat16)
    assert chosen.name == name
    assert (f"triton {triton} is wrong on Hopper" in chosen.reason) == (name == "triton")


PACKS = pytest.mark.parametrize("lengths", [(70, 5), (0, 3, 0, 66, 0), (0, 0)], ids=str)
WITH_STATE = pytest.mark.parametrize("with_state", [False, True], ids=["zeros", "state"])


@PACKS
@WITH_STATE
def test_both_ways_give_the_same_gated_delta_rule(
    fla: list[str], lengths: tuple[int, ...], with_state: bool
) -> None:
    *tokens, state = inputs = delta_inputs(lengths, dtype=torch.float32)
    options = {"cu_seqlens": offsets(lengths), "initial_state": state if with_state else None}
    theirs, ours = (way.chunk_gated_delta_rule(*tokens, **options) for way in (FLA, TORCH))
    assert fla == ["gated_delta_rule"] * bool(sum(lengths))
    leaves = tuple(inputs)
    assert relative_error(theirs, ours) == 0
    assert relative_error(gradients(theirs, leaves), gradients(ours, leaves)) == 0


@PACKS
@WITH_STATE
@pytest.mark.parametrize("with_skip", [False, True], ids=["no skip", "skip"])
def test_both_ways_give_the_same_state_space(
    fla: list[str], lengths: tuple[int, ...], with_state: bool, with_skip: bool
) -> None:
    inputs = ssd_inputs(lengths, dtype=torch.float32)
    x, dt, a_log, b, c, d, bias, state = inputs
    options = {"d_H": d if with_skip else None, "dt_bias_H": bias, "cu_seqlens": offsets(lengths)}
    options["initial_state"] = state if with_state else None
    theirs, ours = (way.chunk_mamba2_ssd(x, dt, a_log, b, c, **options) for way in (FLA, TORCH))
    assert fla == ["simple_gla"] * bool(sum(lengths))
    leaves = tuple(inputs)
    # fp32 sums over at most 70 tokens and 6 rows of a state, in another order.
    assert relative_error(theirs, ours) < 1e-5
    assert relative_error(gradients(theirs, leaves), gradients(ours, leaves)) < 1e-5


def test_a_state_space_in_bf16_is_rounded_where_it_says(fla: list[str]) -> None:
    inputs = ssd_inputs((40, 9), dtype=torch.bfloat16)
    x, dt, a_log, b, c, d, bias, _ = inputs
    # Parameters stay in fp32 where a model keeps them so.
    a_log, d, bias = (p.detach().float().requires_grad_() for p in (a_log, d, bias))
    options = {"d_H": d, "dt_bias_H": bias, "cu_seqlens": offsets((40, 9))}
    theirs, ours = (way.chunk_mamba2_ssd(x, dt, a_log, b, c, **options) for way in (FLA, TORCH))
    assert fla == ["simple_gla"]
    assert [y.dtype for y in theirs] == [y.dtype for y in ours] == [torch.bfloat16, torch.float32]
    # Of dt x, of what is read, and of the sum with what skips the state; ours rounds the last only.
    roundings, unit = 4, torch.finfo(torch.bfloat16).eps / 2
    assert relative_error(theirs, ours) < roundings * unit
    leaves = (x, dt, a_log, b, c, d, bias)
    assert relative_error(gradients(theirs, leaves), gradients(ours, leaves)) < 2 * roundings * unit


@pytest.mark.usefixtures("fla")
@pytest.mark.parametrize("way", [FLA, TORCH], ids=lambda way: way.name)
def test_without_tokens_every_input_still_gets_its_gradient(way: Kernels) -> None:
    """Backward of a rank without documents has to arrive at the collectives before the core."""
    *tokens, _ = delta_inputs((0,), dtype=torch.float32)
    x, dt, a_log, b, c, d, bias, _ = ssd_inputs((0,), dtype=torch.float32)
    output, _ = way.chunk_gated_delta_rule(*tokens, cu_seqlens=(0, 0))
    y, _ = way.chunk_mamba2_ssd(x, dt, a_log, b, c, d_H=d, dt_bias_H=bias, cu_seqlens=(0, 0))
    leaves = (*tokens, x, dt, a_log, b, c, d, bias)
    grads = torch.autograd.grad((output.sum(), y.sum()), leaves, allow_unused=True)
    assert all(grad is not None and not grad.any() for grad in grads)


def state_space(**changed: Any) -> None:
    x, dt, a_log, b, c, d, bias, _ = ssd_inputs((8,), dtype=torch.float32)
    tensors = {"x_THP": x, "dt_TH": dt, "a_log_H": a_log, "b_TGS": b, "c_TGS": c, "d_H": d}
    FLA.chunk_mamba2_ssd(**{**tensors, "dt_bias_H": bias, "cu_seqlens": (0, 8), **changed})


def gated_delta_rule(**changed: Any) -> None:
    q, k, v, g, beta, _ = delta_inputs((8,), dtype=torch.float32)
    tensors = {"q_TGK": q, "k_TGK": k, "v_THV": v, "g_TH": g, "beta_TH": beta}
    FLA.chunk_gated_delta_rule(**{**tensors, "cu_seqlens": (0, 8), **changed})


BOTH = (gated_delta_rule, state_space)
LONG_KEYS = dict.fromkeys(("q_TGK", "k_TGK"), (8, 2, 257))


@pytest.mark.parametrize(
    ("run", "changed", "error", "words"),
    [
        *((run, {"cu_seqlens": (0, 7)}, LayoutError, "cu_seqlens ends at 7") for run in BOTH),
        *((run, {"cu_seqlens": (0, 9, 8)}, LayoutError, "no offset be smaller") for run in BOTH),
        *((run, {"initial_state": (2, 4, 6, 5)}, ConfigError, r"\(1, 4, 6, 5\)") for run in BOTH),
        (gated_delta_rule, {"q_TGK": (8, 4, 6)}, ConfigError, r"has \(8, 2, 6\)"),
        (state_space, {"c_TGS": (8, 4, 6)}, ConfigError, r"has \(8, 2, 6\)"),
        (state_space, {"d_H": (3,)}, ConfigError, r"has \(4,\)"),
        (gated_delta_rule, LONG_KEYS, UnsupportedError, "key heads of 257(.|\n)*at most 256 rows"),
    ],
)
def test_what_does_not_fit_is_refused_before_its_kernels_run(
    fla: list[str], run: Any, changed: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        run(**{n: x if n == "cu_seqlens" else torch.zeros(x) for n, x in changed.items()})
    assert not fla


def test_keys_of_256_numbers_are_short_enough(fla: list[str]) -> None:
    gated_delta_rule(q_TGK=torch.zeros(8, 2, 256), k_TGK=torch.zeros(8, 2, 256))
    assert fla == ["gated_delta_rule"]


@pytest.mark.parametrize(("key_dim", "is_torch"), [(256, False), (257, True)])
def test_longer_keys_than_kernels_carry_are_computed_by_torch(key_dim: int, is_torch: bool) -> None:
    pytest.importorskip("triton", reason="triton has wheels for Linux only")
    kernels, cu = Kernels("triton", "for the test"), (0, 8)
    _, k, v, g, beta, _ = delta_inputs((8,), dtype=torch.float32)
    x, dt, a_log, b, _, _, bias, _ = ssd_inputs((8,), dtype=torch.float32)
    k, b = (one.new_zeros(*one.shape[:2], key_dim) for one in (k, b))
    with recorded():
        delta = kernels.delta_chunks(k, v, g, beta, cu_seqlens=cu)
        space = kernels.ssd_chunks(x, dt, a_log, b, dt_bias_H=bias, cu_seqlens=cu)
    assert [isinstance(delta, DeltaChunks), isinstance(space, SsdChunks)] == [is_torch] * 2
