"""The kernels of both recurrences against the token-by-token form in fp64, and torch beside them.

They run under Triton's interpreter on the CPU: the same source, program by program, with products
in fp32. What is read before it is written is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from core_support.interpreter import interpreted
from gdn_cp_bench.slow_decay import delta_inputs, gradients, offsets, relative_error, ssd_inputs
from gdn_cp_bench.transformers_layers import (
    gated_delta_net_of_cores,
    mamba2_of_cores,
    one_by_one,
    set_slow,
)
from gdn_cp_support.kernels import MODULES, TORCH, TRITON, assert_each_as_accurate, in_double
from gdn_cp_support.naive_recurrences import (
    naive_recurrent_gated_delta_rule,
    naive_recurrent_mamba2_ssd,
)
from pcomm.core.errors import ConfigError, LayoutError, UnsupportedError
from pcomm.core.testing.assertions import assert_as_accurate, assert_equal, poisoned_memory
from pcomm.gdn_cp.ops.backend import Kernels
from pcomm.gdn_cp.specs import MatrixTransition, ScalarTransition

Tensors = tuple[Tensor, ...]
# Nothing, a chunk, one token more; and then a token, a chunk less one, and a chunk between two.
LENGTHS = (0, 64, 65)
MORE_LENGTHS = (1, 63, 0, 64, 65, 129)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    with interpreted(MODULES), poisoned_memory():
        yield


class Delta:
    """The gated delta rule, whose keys and values have the widths that are asked for."""

    transition, name = MatrixTransition(), "delta"

    @staticmethod
    def inputs(lengths: tuple[int, ...], key_dim: int, value_dim: int, **options: Any) -> Any:
        sizes = {"key_heads": 1, "heads": 2, "key_dim": key_dim, "value_dim": value_dim}
        return delta_inputs(lengths, **{**sizes, **options})

    @staticmethod
    def run(inputs: Any, cu: tuple[int, ...], way: Kernels | None) -> Tensors:
        """Output and final state; token by token without kernels."""
        *tokens, state = inputs
        run = naive_recurrent_gated_delta_rule if way is None else way.chunk_gated_delta_rule
        return run(*tokens, cu_seqlens=cu, initial_state=state)

    @staticmethod
    def chunks(inputs: Any, cu: tuple[int, ...], way: Kernels) -> Any:
        return way.delta_chunks(*inputs[1:5], cu_seqlens=cu)

    @staticmethod
    def outputs(chunks: Any, inputs: Any, states: Tensor) -> Tensors:
        found: Tensors = chunks.outputs(inputs.q_TGK, initial_state=states)
        return found


class Space:
    """The same of Mamba-2."""

    transition, name = ScalarTransition(), "ssd"

    @staticmethod
    def inputs(lengths: tuple[int, ...], key_dim: int, value_dim: int, **options: Any) -> Any:
        sizes = {"groups": 1, "heads": 2, "state_dim": key_dim, "head_dim": value_dim}
        return ssd_inputs(lengths, **{**sizes, **options})

    @staticmethod
    def run(inputs: Any, cu: tuple[int, ...], way: Kernels | None) -> Tensors:
        x, dt, a_log, b, c, d, bias, state = inputs
        run = naive_recurrent_mamba2_ssd if way is None else way.chunk_mamba2_ssd
        options = {"d_H": d, "dt_bias_H": bias, "cu_seqlens": cu, "initial_state": state}
        return run(x, dt, a_log, b, c, **options)

    @staticmethod
    def chunks(inputs: Any, cu: tuple[int, ...], way: Kernels) -> Any:
        x, dt, a_log, b, _, _, bias, _ = inputs
        return way.ssd_chunks(x, dt, a_log, b, dt_bias_H=bias, cu_seqlens=cu)

    @staticmethod
    def outputs(chunks: Any, inputs: Any, states: Tensor) -> Tensors:
        found: Tensors = chunks.outputs(inputs.c_TGS, d_H=inputs.d_H, initial_state=states)
        return found


CORES = pytest.mark.parametrize("core", [Delta, Space], ids=lambda core: core.name)
# Where what is tested is the same code of both.
ONE_CORE = pytest.mark.parametrize(
    "core", [Delta, pytest.param(Space, marks=pytest.mark.soak)], ids=lambda core: core.name
)


# NumPy says aloud, in the interpreter, what a GPU does not.
QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def results(core: Any, inputs: Any, cu: tuple[int, ...], way: Kernels | None) -> Tensors:
    outputs = core.run(inputs, cu, way)
    return (*(x.detach() for x in outputs), *gradients(outputs, tuple(inputs)))


def compare(core: Any, inputs: Any, cu: tuple[int, ...], num_terms: int = 64) -> None:
    """Ours, torch's, and the recurrence in fp64: output, final state and all gradients."""
    exact = results(core, type(inputs)(*in_double(inputs)), cu, None)
    ours, plain = (results(core, inputs, cu, way) for way in (TRITON, TORCH))
    if core is Space:
        # The bias is added to each step size, so it gets the sum of what these get: of several
        # hundred there is less than ten left, with the roundings of all.
        (*ours, bias, state), (*plain, plain_bias, plain_state) = ours, plain
        (*exact, exact_bias, exact_state), of_steps = exact, exact[3]
        left = float(exact_bias.norm() / of_steps.abs().sum(0).norm())
        assert_as_accurate(bias, plain_bias, exact_bias, num_terms=round(num_terms / left))
        ours, plain, exact = (*ours, state), (*plain, plain_state), (*exact, exact_state)
    assert_each_as_accurate(ours, plain, exact, num_terms)


@CORES
@pytest.mark.parametrize("lengths", [LENGTHS, pytest.param(MORE_LENGTHS, marks=pytest.mark.soak)])
def test_packs_with_documents_of_all_lengths(core: Any, lengths: tuple[int, ...]) -> None:
    compare(core, core.inputs(lengths, 6, 5, dtype=torch.float32), offsets(lengths))


# Both sides of: the least width of a product, rows at a time, columns of a scan and of a read, and
# rows from which a scan has fewer.
WIDTHS = [(Delta, 16, 33), (Space, 17, 16), (Space, 64, 65), (Delta, 65, 32), (Delta, 129, 17)]
OTHER_WIDTHS = [(core, *widths) for core, widths in (
    (Space, (16, 33)), (Delta, (17, 16)), (Delta, (64, 65)), (Space, (65, 32)),
    (Space, (129, 17)), (Space, (128, 33)),
)]  # fmt: skip


@pytest.mark.parametrize(
    ("core", "key_dim", "value_dim"),
    [*WIDTHS, *(pytest.param(*one, marks=pytest.mark.soak) for one in OTHER_WIDTHS)],
)
def test_heads_on_both_sides_of_each_width(core: Any, key_dim: int, value_dim: int) -> None:
    inputs = core.inputs((65,), key_dim, value_dim, dtype=torch.float32, heads=1)
    compare(core, inputs, (0, 65), num_terms=65)


@pytest.mark.parametrize(("core", "heads"), [(Delta, 5), (Space, 4)])
def test_more_value_heads_than_a_program_collects(core: Any, heads: int) -> None:
    compare(core, core.inputs((9,), 6, 5, dtype=torch.float32, heads=heads), (0, 9))


@ONE_CORE
def test_values_of_half_precision_and_heads_of_a_wider_tensor(core: Any) -> None:
    inputs = core.inputs((5, 4), 16, 16, dtype=torch.bfloat16, heads=1)
    cu = (0, 5, 9)
    compare(core, inputs, cu)
    assert core.run(inputs, cu, TRITON)[0].dtype == torch.bfloat16
    # What a projection leaves: each tensor is a stretch of the columns of something wider.
    apart = []
    for x in inputs:
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype)
        wide[..., 2 : x.shape[-1] + 2] = x.detach()
        apart.append(wide[..., 2 : x.shape[-1] + 2].requires_grad_())
    for mine, theirs in zip(
        results(core, type(inputs)(*apart), cu, TRITON),
        results(core, inputs, cu, TRITON),
        strict=True,
    ):
        assert_equal(mine, theirs)


@CORES
def test_without_an_initial_state_and_with_a_gradient_of_one_result(core: Any) -> None:
    *tensors, state = inputs = core.inputs((5,), 6, 5, dtype=torch.float32, heads=1)
    zeros = type(inputs)(*tensors, torch.zeros_like(state))
    nothing = type(inputs)(*tensors, None)
    for place in (0, 1):
        ours, theirs = (core.run(x, (0, 5), TRITON) for x in (nothing, zeros))
        assert_equal(ours[place], theirs[place])
        found, wanted = (
            torch.autograd.grad(x[place].square().sum(), tensors, allow_unused=True)
            for x in (ours, core.run(nothing, (0, 5), TORCH))
        )
        for mine, plain in zip(found, wanted, strict=True):
            if mine is None:
                # Queries have no part in the state; torch's form gives them zeros.
                assert plain is None or not plain.any()
            else:
                assert relative_error([mine], [plain]) < 1e-5


def test_weak_decays_behind_strong_ones_keep_their_digits() -> None:
    """40 tokens that forget all, and then some that keep nearly all."""
    inputs = delta_inputs((64,), key_heads=1, heads=1, key_dim=16, value_dim=16)
    g = torch.full((64, 1), -103.0)
    g[40:] = -1e-2
    inputs = inputs._replace(g_TH=g, beta_TH=torch.full_like(g, 0.5))
    (found, _), (exact, _) = (
        Delta.run(one, (0, 64), way)
        for one, way in ((inputs, TRITON), (type(inputs)(*in_double(inputs)), None))
    )
    error = (found.double() - exact)[40:].abs().max() / exact[40:].abs().max()
    # A decay is the difference of two sums, each of which is rounded once.
    assert error <= torch.finfo(torch.float32).eps * 40 * 103


@QUIET
def test_gates_at_their_limits_stay_finite_forward_and_backward() -> None:
    *tokens, state = delta_inputs((80,), key_heads=1, heads=2, dtype=torch.float32)
    q, k, v, g, beta = (x.detach().clone() for x in tokens)
    g[::3], g[1::7], g[2::7], beta[::4], beta[1::4] = -1e4, -torch.inf, 0, 0, 1
    q[5:8], k[9:60] = 0, k[9]
    leaves = [x.requires_grad_() for x in (q, k, v, g, beta)]
    options = {"cu_seqlens": (0, 80), "initial_state": state}
    ours = TRITON.chunk_gated_delta_rule(*leaves, **options)
    theirs = naive_recurrent_gated_delta_rule(*leaves, **options)
    # A decay is the exponential of a difference of sums: 64 tokens of at most 103 each, in fp32.
    bound = 64 * 103 * torch.finfo(torch.float32).eps / 2
    assert relative_error(ours, theirs) < bound
    wanted = (*leaves, state)
    assert relative_error(gradients(ours, wanted), gradients(theirs, wanted)) < bound


@QUIET
@CORES
def test_a_sequence_does_not_depend_on_its_neighbours(core: Any) -> None:
    inputs = core.inputs((7, 10, 12), 6, 5, dtype=torch.float32, heads=1)
    cu, changed = (0, 7, 17, 29), []
    for x in inputs:
        copy = x.detach().clone()
        if len(x) == 29:
            copy[:7], copy[17:] = torch.inf, torch.nan
        changed.append(copy.requires_grad_())
    (expected, left), (actual, found) = (
        core.run(x, cu, TRITON) for x in (inputs, type(inputs)(*changed))
    )
    assert_equal(actual[7:17], expected[7:17])
    assert_equal(found[1], left[1])
    ours = gradients((actual[7:17], found[1]), changed)
    theirs = gradients((expected[7:17], left[1]), tuple(inputs))
    for mine, wanted, x in zip(ours, theirs, inputs, strict=True):
        if len(x) == 29:
            assert_equal(mine[7:17], wanted[7:17])


@CORES
def test_segments_started_from_summaries_are_the_whole(core: Any) -> None:
    """What ranks do: summaries of all segments, a fold, then each segment from its own state."""
    segments, total = (65, 0, 30), 95
    inputs = core.inputs((total,), 6, 5, dtype=torch.float32, heads=1)
    chunks = core.chunks(inputs, offsets(segments), TRITON)
    transitions, written = chunks.summary()
    starts = [inputs[-1]]
    for n in range(len(segments)):
        summary = (transitions[n : n + 1], written[n : n + 1])
        starts.append(core.transition.apply(summary, starts[-1]))
    output, finals = core.outputs(chunks, inputs, torch.cat(starts[:-1]))
    leaves = tuple(inputs)
    exact = type(inputs)(*in_double(leaves))
    parts, whole = (output, finals[-1:]), core.run(exact, (0, total), None)
    assert relative_error(parts, whole) < 1e-5
    assert relative_error([starts[-1]], [whole[1]]) < 1e-5
    assert relative_error(gradients(parts, leaves), gradients(whole, tuple(exact))) < 1e-5


@ONE_CORE
def test_two_at_once_do_not_meet_and_keep_no_more_than_their_inputs(core: Any) -> None:
    cu, sizes = (0, 6, 10), {"dtype": torch.float32, "heads": 1}
    inputs = [core.inputs((6, 4), 6, 5, seed=seed, **sizes) for seed in (0, 7)]
    alone = [results(core, each, cu, TRITON) for each in inputs]
    kept = set[int]()

    def keep(x: Tensor) -> Tensor:
        kept.add(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        outputs = [core.run(each, cu, TRITON) for each in inputs]
    assert max(kept) <= max(x.numel() for x in inputs[0])
    backwards = [gradients(outputs[n], tuple(inputs[n])) for n in (1, 0)][::-1]
    for n in (0, 1):
        for mine, wanted in zip((*outputs[n], *backwards[n]), alone[n], strict=True):
            assert_equal(mine.detach(), wanted)


@pytest.mark.parametrize("kernels", [TORCH, TRITON], ids=["torch", "triton"])
@ONE_CORE
def test_a_second_derivative_is_refused(core: Any, kernels: Kernels) -> None:
    """Also where the loss is linear, so that what arrives is a constant."""
    inputs = core.inputs((5,), 6, 5, dtype=torch.float32)
    output, _ = core.run(inputs, (0, 5), kernels)
    for loss in (output.square().sum(), output.sum()):
        with pytest.raises(UnsupportedError, match="create_graph=True"):
            torch.autograd.grad(loss, inputs[0], create_graph=True, retain_graph=True)


def delta(**changed: Any) -> None:
    names = ("q_TGK", "k_TGK", "v_THV", "g_TH", "beta_TH")
    tensors = dict(zip(names, delta_inputs((8,), dtype=torch.float32), strict=False))
    TRITON.chunk_gated_delta_rule(**{**tensors, "cu_seqlens": (0, 8), **changed})


def space(**changed: Any) -> None:
    names = ("x_THP", "dt_TH", "a_log_H", "b_TGS", "c_TGS", "d_H", "dt_bias_H")
    tensors = dict(zip(names, ssd_inputs((8,), dtype=torch.float32), strict=False))
    TRITON.chunk_mamba2_ssd(**{**tensors, "cu_seqlens": (0, 8), **changed})


@pytest.mark.parametrize(
    ("call", "changed", "error", "words"),
    [
        (delta, {"v_THV": (7, 4, 5)}, LayoutError, "v: 7 tokens, and cu_seqlens ends at 8"),
        (delta, {"v_THV": (8, 3, 5)}, ConfigError, "3 value heads and 2 key heads"),
        (delta, {"q_TGK": (8, 1, 6)}, ConfigError, r"queries: shape \(8, 1, 6\)"),
        (delta, {"initial_state": (1, 1, 6, 5)}, ConfigError, "initial_state"),
        (space, {"b_TGS": (7, 2, 6)}, LayoutError, "b: 7 tokens, and cu_seqlens ends at 8"),
        (space, {"c_TGS": (8, 1, 6)}, ConfigError, r"queries: shape \(8, 1, 6\)"),
        (space, {"d_H": (1,)}, ConfigError, "d: shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    call: Any, changed: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call(**{name: torch.zeros(shape) for name, shape in changed.items()})


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_layers_of_transformers_by_the_kernels(family: str) -> None:
    name = f"transformers.models.{family}.modeling_{family}"
    models = pytest.importorskip(name, reason="transformers is an oracle: extra `test`")
    if family == "mamba2":
        config = models.Mamba2Config(
            hidden_size=16,
            num_heads=4,
            head_dim=8,
            state_size=6,
            n_groups=2,
            expand=2,
            num_hidden_layers=1,
            use_conv_bias=True,
        )
        layer, run = models.Mamba2Mixer(config, layer_idx=0), mamba2_of_cores
    else:
        config = models.Qwen3NextConfig(
            hidden_size=16,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=6,
            linear_value_head_dim=8,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
        )
        layer, run = models.Qwen3NextGatedDeltaNet(config, layer_idx=0), gated_delta_net_of_cores
    set_slow(layer)
    cu, generator = (0, 6, 7), torch.Generator().manual_seed(1)
    hidden = torch.randn(cu[-1], 16, generator=generator).requires_grad_()

    def with_gradients(output: Tensor, hidden: Tensor) -> Tensors:
        return (output.detach(), *gradients((output,), (hidden, *layer.parameters())))

    ours = with_gradients(run(layer, hidden, cu, TRITON), hidden)
    theirs = with_gradients(one_by_one(layer, hidden, cu), hidden)
    layer.double()
    (wide,) = in_double([hidden])
    exact = with_gradients(run(layer, wide, cu, TORCH), wide)
    # Sums of the kernels are over the 64 places of a chunk.
    assert_each_as_accurate(ours, theirs, exact, 64)
