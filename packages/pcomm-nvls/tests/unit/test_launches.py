"""What the host does for a launch: once, and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from core_support.fake_driver import fake_driver
from nvls_support.calls import calls
from nvls_support.fake_device import STREAM, FakeStream, fake_workspace
from nvls_support.refusals import refused
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.nvls.collectives.gathers import (
    all_gather_coalesced_launch,
    all_gather_into_tensor,
    all_gather_launch,
    gather_to_rank_launch,
)
from pcomm.nvls.collectives.ragged import all_gather_v
from pcomm.nvls.collectives.reductions import (
    all_reduce,
    all_reduce_launch,
    reduce_scatter_launch,
    reduce_scatter_tensor,
)
from pcomm.nvls.operators import WorkspaceOperators
from pcomm.nvls.policy.choose import Choice
from pcomm.nvls.policy.table import OPERATIONS as OPERATION_FACTS
from pcomm.nvls.workspace import launch as repeats
from pcomm.nvls.workspace.launch import _MOST_CALLS, Launch, values_of
from pcomm.nvls.workspace.workspace import Workspace

SIZE = 4
X = torch.zeros(SIZE * 64, 8, dtype=torch.bfloat16)
OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "all_reduce": all_reduce,
    "all_gather_into_tensor": all_gather_into_tensor,
    "reduce_scatter_tensor": reduce_scatter_tensor,
}


@pytest.fixture(scope="module")
def launches() -> Iterator[list[tuple[Any, ...]]]:
    """The launches that reached the driver."""
    found: list[tuple[Any, ...]] = []
    with fake_driver(launches=found):
        yield found


@pytest.fixture
def stream() -> FakeStream:
    return FakeStream()


@pytest.fixture(params=["with guards", "without guards"])
def workspace(launches, stream, monkeypatch, request):
    """A workspace; repeated calls are known by a call of torch, or by looking at each property."""
    launches.clear()
    if request.param == "without guards":
        monkeypatch.setattr(repeats, "guard_of", lambda *_: lambda *_: False)
    with fake_workspace(SIZE, 1 << 20, stream=stream) as made:
        yield made


def variants_of(launch: Launch) -> dict[Any, Any]:
    """What Triton has compiled of the kernel of a launch for the device that is claimed."""
    device = driver.active.get_current_device()
    variants: dict[Any, Any] = launch.kernel.device_caches[device][0]
    return variants


class Counted:
    """Calls of a function that still does what it did."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        return self.function(*arguments, **options)


@pytest.mark.parametrize("algo", ["lamport", "multimem", "p2p"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_equal_call_builds_and_compiles_nothing(workspace, launches, monkeypatch, name, algo):
    run = OPERATIONS[name]
    first = [run(X, workspace=workspace, algo=algo) for _ in range(2)]  # one a slot
    compiled, built = workspace.launcher.num_compiled, Counted(workspace.choose)
    monkeypatch.setattr(workspace, "choose", built)
    again = [run(X, workspace=workspace, algo=algo) for _ in range(4)]
    assert workspace.launcher.num_compiled == compiled
    assert built.calls == 0
    assert workspace.num_launches == len(launches) == 6
    # The second pair of launches is the first one but for the address of the result.
    kernels = [launch[0] for launch in launches]
    assert len(set(kernels)) == 1
    for place in range(4):
        ours, model = launches[2 + place], launches[place % 2]
        assert _without(ours, again[place]) == _without(model, first[place % 2])
        assert again[place].shape == first[0].shape


def _without(launch: tuple[Any, ...], result: Tensor) -> list[Any]:
    """The arguments of a launch, with a mark in place of the address of its result."""
    values = [
        "result" if type(value) is int and value == result.data_ptr() else value for value in launch
    ]
    assert "result" in values
    return values


def test_a_call_that_differs_is_checked_again(workspace, launches):
    out = torch.empty_like(X)
    for _ in range(4):
        all_reduce(X, out=out, workspace=workspace)
    with pytest.raises(UnsupportedError, match="gradient"):
        all_reduce(X.clone().requires_grad_(), out=out, workspace=workspace)
    slot = workspace.empty(X.shape, X.dtype)
    with pytest.raises(ConfigError, match="memory that other ranks read"):
        all_reduce(X, out=slot, workspace=workspace)
    all_reduce(X, out=out, workspace=workspace)  # takes the turn that was handed out

    def addresses(x: Tensor, given: Tensor) -> list[Any]:
        all_reduce(x, out=given, workspace=workspace)
        return list(launches[-1])

    turned = torch.zeros(8, SIZE * 64, dtype=X.dtype).t()
    assert turned.data_ptr() not in addresses(turned, out)
    shifted = torch.zeros(X.numel() + 1, dtype=X.dtype)[1:].view(X.shape)
    assert shifted.data_ptr() not in addresses(shifted, out)
    assert shifted.data_ptr() not in addresses(X, shifted)
    room = torch.zeros(2 * X.numel(), dtype=X.dtype)
    low, high = room[: X.numel()].view(X.shape), room[64 : 64 + X.numel()].view(X.shape)
    assert low.data_ptr() not in addresses(low, high)
    assert low.data_ptr() not in addresses(low, high)
    assert low.data_ptr() in addresses(low, low)
    assert X.data_ptr() in addresses(X, out)


def test_a_sum_in_place_is_launched_again(workspace, launches):
    x = torch.zeros_like(X)
    for _ in range(4):
        assert all_reduce(x, out=x, workspace=workspace) is x
    out = torch.empty_like(x)
    assert all_reduce(x, out=out, workspace=workspace) is out
    assert all_reduce(x, workspace=workspace) is not x
    assert len({launch[0] for launch in launches}) == 1
    assert [list(launch).count(x.data_ptr()) for launch in launches] == [2, 2, 2, 2, 1, 1]


def test_turns_go_on_through_repeated_calls(workspace, launches):
    places = [workspace.regions.slot(place) for place in range(2)]
    for _ in range(3):
        all_reduce(X, workspace=workspace, algo="p2p")
        all_gather_into_tensor(X, workspace=workspace, algo="p2p")
        all_reduce(X, workspace=workspace, algo="p2p")
    seen = [place for launch in launches for place in places if place in launch[1:]]
    assert seen == [places[number % 2] for number in range(9)]


def test_a_repeated_call_keeps_to_the_stream_and_to_the_workspace(workspace, stream):
    for _ in range(4):
        all_reduce(X, workspace=workspace)
    stream.handle += 1
    refused(ConfigError, "another stream", all_reduce, X, workspace=workspace)
    stream.handle -= 1
    workspace.failure_word.value = 3
    refused(Exception, "rank 2 did not signal", all_reduce, X, workspace=workspace)
    workspace.failure_word.value = 0
    all_reduce(X, workspace=workspace)
    workspace.close()
    refused(Exception, "closed", all_reduce, X, workspace=workspace)


def test_operators_of_a_compiled_model_follow_from_stream_to_stream(workspace, stream):
    operators = WorkspaceOperators(workspace)
    all_reduce(X, workspace=workspace)
    stream.handle += 1
    calls_of_all: list[Callable[[], Any]] = [
        lambda: operators.all_gather(X),
        lambda: operators.reduce_scatter(X),
        lambda: operators.all_reduce(X),
        lambda: operators.all_reduce_add_rmsnorm(X, X, X[0], 1e-6),
        lambda: operators.reduce_scatter_add_rmsnorm_all_gather(X, X[:64], X[0], 1e-6),
    ]
    for call in calls_of_all:
        call()
        stream.handle += 1
    assert stream.waits == [(handle + 1, handle) for handle in range(STREAM, STREAM + 5)]


def test_a_capture_refuses_to_compile_and_names_what_to_call(workspace, stream, launches):
    counts = torch.full((SIZE,), 3, dtype=torch.int32)

    def step() -> None:
        all_reduce(X, workspace=workspace, algo="multimem")
        all_gather_v(X, counts, workspace=workspace, algo="p2p")
        x = workspace.empty(X.shape, X.dtype)
        reduce_scatter_tensor(x, workspace=workspace, algo="multimem")

    all_reduce(X, workspace=workspace, algo="multimem")
    stream.captured = True
    # With the entry barrier that an operation in a graph has: compiled by the call before.
    all_reduce(X, workspace=workspace, algo="multimem")
    refused(ConfigError, r"(?s)all_gather_v.*ENTRY=True.*Workspace.prepare", step)
    stream.captured = False
    before, generation = len(launches), workspace.turns.rotation.generation
    workspace.prepare(step)
    assert len(launches) == before
    assert workspace.turns.rotation.generation == generation
    compiled = workspace.launcher.num_compiled
    stream.captured = True
    for _ in range(2):
        step()
    with workspace.sequence():
        step()
    stream.captured = False
    step()
    assert workspace.launcher.num_compiled == compiled
    names = [launch[0] for launch in launches[before:]]
    assert names[:4] == [
        "one_shot_all_reduce_kernel",
        "all_gather_v_kernel",
        "wait_for_all_kernel",
        "reduce_scatter_kernel",
    ]


@pytest.mark.parametrize(("vectors", "at_a_time"), [(65535, 1), (65536, 4)])
def test_a_thread_moves_four_vectors_at_a_time_where_all_have_them(workspace, vectors, at_a_time):
    choice = Choice("multimem", num_blocks=32, num_warps=16, because="the largest grid")
    part = torch.empty(vectors, 8, dtype=torch.bfloat16)
    whole = torch.empty(SIZE * vectors, 8, dtype=torch.bfloat16)
    longer = torch.empty(SIZE * SIZE * vectors, 8, dtype=torch.bfloat16)
    for launch in (
        all_gather_launch(workspace, choice, whole, part, 0),
        gather_to_rank_launch(workspace, choice, whole, part, 0, 0),
        reduce_scatter_launch(workspace, choice, part, whole, 0),
        # The shortest of the tensors says it.
        all_gather_coalesced_launch(workspace, choice, [(longer, whole), (whole, part)]),
        # In two shots, so a rank sums a segment.
        all_reduce_launch(workspace, choice, whole, whole),
    ):
        assert launch.arguments["BLOCK"] == 512 * at_a_time, launch.kernel


def test_a_second_graph_of_other_kernels_needs_no_more_than_a_call_before_it(workspace, stream):
    """After the first one a call outside has an entry barrier, and most in a graph have none."""
    for rows in (SIZE * 64, SIZE << 14):
        x, part = (torch.zeros(n, 8, dtype=X.dtype) for n in (rows, rows // SIZE))
        calls_of_both: list[Callable[[], Any]] = [
            lambda x=x: all_reduce(x, workspace=workspace, algo="p2p"),
            lambda x=part: all_gather_into_tensor(x, workspace=workspace, algo="p2p"),
        ]
        for call in calls_of_both:
            call()
        compiled = workspace.launcher.num_compiled
        with workspace.turns.recording():
            stream.captured = True
            for call in 2 * calls_of_both:
                call()
        stream.captured = False
        assert workspace.launcher.num_compiled == compiled


def test_memory_that_was_handed_out_keeps_to_its_stream(workspace, stream):
    x = workspace.empty(X.shape, X.dtype)
    stream.handle += 1
    for again in (
        lambda: all_reduce(x, workspace=workspace),
        lambda: workspace.empty((8,), X.dtype),
    ):
        refused(ConfigError, "another stream", again)
    stream.handle -= 1
    all_reduce(x, workspace=workspace)
    assert workspace.num_launches == 1


def test_a_recording_that_is_given_up_has_used_no_turn(workspace, stream):
    """Else a rank that recorded fewer operations than the others would use other slots."""
    for _ in range(3):
        all_reduce(X, workspace=workspace, algo="p2p")
    workspace.prepare(lambda: all_reduce(workspace.empty(X.shape, X.dtype), workspace=workspace))

    def record() -> None:
        with workspace.turns.recording():
            stream.captured = True
            for _ in range(2):
                all_reduce(X, workspace=workspace, algo="p2p")
            workspace.empty(X.shape, X.dtype)
            raise RuntimeError("given up")

    refused(RuntimeError, "given up", record)
    stream.captured = False
    turn = workspace.turn()
    assert (turn.generation, turn.slot, turn.needs_entry, turn.is_prepared) == (3, 1, False, False)
    # One that is kept has used them: its slots may be in use whenever it is replayed. Within it the
    # operation before is known, but for that of the first.
    with workspace.turns.recording():
        stream.captured = True
        recorded = [workspace.turn().needs_entry for _ in range(3)]
    stream.captured = False
    turn = workspace.turn()
    assert recorded == [True, False, False]
    assert (turn.generation, turn.needs_entry) == (7, True)


@pytest.mark.parametrize("first_in_graph", [False, True])
def test_memory_that_was_handed_out_keeps_to_its_graph(workspace, stream, launches, first_in_graph):
    """Replays would write to it while other ranks still read what the replay before has left."""
    workspace.prepare(
        lambda: all_reduce(workspace.empty(X.shape, X.dtype), workspace=workspace, algo="p2p")
    )
    workspace.prepare(lambda: all_reduce(X, workspace=workspace, algo="p2p"))
    stream.captured = first_in_graph
    with workspace.sequence():
        all_reduce(X, workspace=workspace, algo="p2p")
        x = workspace.empty(X.shape, X.dtype)
    stream.captured = not first_in_graph
    refused(ConfigError, "in the same CUDA graph", all_reduce, x, workspace=workspace, algo="p2p")
    # The turn was not used up, and the operation that has it meets the others before it writes.
    turn = workspace.turn()
    assert (turn.generation, turn.slot, turn.needs_entry) == (1, 1, True)
    assert not turn.is_prepared


def test_a_launch_that_fails_uses_up_no_slot(workspace, monkeypatch):
    """Else the next operation would write where another rank still reads the one before."""
    all_reduce(X, workspace=workspace)

    def fail(launch: Any) -> None:
        raise RuntimeError("out of registers")

    with monkeypatch.context() as patch:
        patch.setattr(workspace.launcher, "run", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of registers"):
                all_reduce(X, workspace=workspace, algo="p2p")
        x = workspace.empty(X.shape, X.dtype)
        refused(RuntimeError, "out of registers", all_reduce, x, workspace=workspace, algo="p2p")
    turn = workspace.turn()
    assert (turn.slot, turn.generation, turn.is_prepared) == (1, 1, True)


def test_a_wait_that_fails_hands_nothing_out(workspace: Workspace, stream: FakeStream) -> None:
    stream.captured = True
    for _ in range(2):
        # The second time, too: in a graph the slot is written to by each replay.
        refused(ConfigError, "wait_for_all_kernel", workspace.empty, X.shape, X.dtype)
    assert workspace.turns.rotation.generation == 0


def test_torch_distributed_gets_no_memory_that_other_ranks_store_to(workspace, monkeypatch):
    """A rank that has its segment may go on to a kernel while this one sends to a third."""
    from pcomm.nvls import reduce_scatter_v, references

    sent: list[Tensor] = []

    def reference(x: Tensor, *_: Any, **__: Any) -> Tensor:
        sent.append(x)
        return x

    x = workspace.empty((SIZE, 3), torch.float64).fill_(1.5)
    for operation in ("reduce_scatter_tensor", "reduce_scatter_v"):
        monkeypatch.setattr(references, operation, reference)
    reduce_scatter_tensor(x, workspace=workspace)
    reduce_scatter_v(x, [1] * SIZE, workspace=workspace)
    begin, end = workspace.own_range
    assert [one.unique().tolist() for one in sent] == [[1.5], [1.5]]
    assert not [one for one in sent if begin <= one.data_ptr() < end]


def test_as_many_calls_are_kept_as_there_is_room_for(workspace: Workspace) -> None:
    for rows in range(1, _MOST_CALLS + 1):
        all_reduce(torch.zeros(rows, 8, dtype=X.dtype), workspace=workspace, algo="p2p")
    assert len(workspace.repeats) == _MOST_CALLS
    all_reduce(torch.zeros(_MOST_CALLS + 1, 8), workspace=workspace, algo="p2p")
    assert len(workspace.repeats) == 1


def test_calls_that_are_compared_between_ranks_are_not_skipped(launches):
    with fake_workspace(SIZE, debug=True) as workspace:
        for _ in range(3):
            all_reduce(X, workspace=workspace)
        assert not workspace.repeats


def test_a_result_in_the_workspace_is_refused_again(workspace: Workspace) -> None:
    for _ in range(4):
        all_reduce(X, workspace=workspace, algo="p2p")
    assert workspace.memory is not None
    start = workspace.regions.slot(0)
    inside = workspace.memory.buffer()[start : start + X.nbytes].view(X.dtype).view(X.shape)
    with pytest.raises(ConfigError, match="memory that other ranks read"):
        all_reduce(X, out=inside, workspace=workspace, algo="p2p")
    refused(ConfigError, "not handed out", all_reduce, inside, workspace=workspace, algo="p2p")


def test_a_repeated_call_keeps_to_what_an_out_means(workspace, launches):
    out = torch.zeros_like(X)
    for _ in range(4):
        before = out._version
        all_reduce(X, out=out, workspace=workspace, algo="p2p")
        assert launches[-1].count(out.data_ptr()) == 1
        # So a backward that needs what was there raises.
        assert out._version > before
    for other in (torch._neg_view(torch.zeros_like(X)), torch.zeros_like(X, requires_grad=True)):
        all_reduce(X, out=other, workspace=workspace, algo="p2p")
        assert other.data_ptr() not in launches[-1]


def test_what_was_handed_out_stays_so_while_kernels_are_prepared(workspace: Workspace) -> None:
    x = workspace.empty(X.shape, X.dtype)
    workspace.prepare(lambda: all_reduce(X, workspace=workspace))
    all_reduce(x, workspace=workspace, algo="p2p")


CASES = [(name, algo) for name, one in OPERATION_FACTS.items() for algo in one.algorithms]


# Kernels that read from peers have no instruction that only Blackwell has. Of these, and of all on
# Blackwell, one of each way to be launched: others are launched on Hopper by multicast, and are
# compiled for Blackwell in `test_compiled_kernels` and `test_compiled_lamport`.
SHORT = {
    (90, "lamport"): [*OPERATION_FACTS],
    (90, "multimem"): [*OPERATION_FACTS],
    (90, "p2p"): [*OPERATIONS, "all_gather_v", "gather_to_rank", "all_reduce_add_rmsnorm"],
    (100, "lamport"): ["all_reduce"],
    (100, "multimem"): [
        *("all_gather_coalesced", "all_gather_v", "reduce_scatter_v", "all_reduce"),
        "reduce_scatter_add_rmsnorm_all_gather",
    ],
}


@pytest.mark.parametrize(
    ("name", "algo", "capability"),
    [
        pytest.param(*case, capability, marks=[pytest.mark.soak] * is_long)
        for capability in (90, 100)
        for case in CASES
        for is_long in [case[0] not in SHORT.get((capability, case[1]), [])]
    ],
)
def test_each_operation_is_launched_as_it_was_compiled(name, algo, capability):
    """The driver refuses all else: in first calls, in repeated ones, and under a profiler."""
    launches: list[tuple[Any, ...]] = []
    told: list[str] = []
    driver_of_case = fake_driver(capability, launches)
    with driver_of_case, fake_workspace(SIZE, capability=capability) as workspace:
        run = calls(workspace, hidden=64)[name, algo]
        for _ in range(5):
            run()
        hook = knobs.runtime.launch_enter_hook
        hook.add(note := lambda metadata: told.append(metadata.get()["name"]))
        try:
            run()
        finally:
            hook.remove(note)
    kernels = {launch[0] for launch in launches}
    assert len(launches) == 6
    assert kernels == set(told)
    assert len(kernels) == len(told) == 1


@pytest.mark.parametrize("fences", [False, True])
def test_barriers_by_multicast_get_the_fences_that_a_workspace_asks_for(launches, fences):
    ways: list[tuple[str, str]] = []
    with fake_workspace(SIZE, alias_fences=fences) as workspace:
        run = workspace.launcher.run

        def noted(launch: Launch) -> None:
            ways.append((launch.kernel.__name__, launch.arguments["WAY"]))
            run(launch)

        workspace.launcher.run = noted  # type: ignore[method-assign]
        for algo in ("lamport", "multimem", "p2p"):
            all_reduce(X, workspace=workspace, algo=algo)
        workspace._wait_for_all()
    barrier = "fenced multicast" if fences else "multicast"
    assert ways == [
        ("lamport_all_reduce_kernel", "multicast"),
        ("one_shot_all_reduce_kernel", barrier),
        ("one_shot_all_reduce_kernel", "peers"),
        ("wait_for_all_kernel", barrier),
    ]


def test_no_driver_finds_the_kernels_of_one_before() -> None:
    """Triton keeps them by the number of the device, longer than the driver that they were for."""
    numbers = []
    for _ in range(20):
        with fake_driver():
            numbers.append(driver.active.get_current_device())
    assert len(set(numbers)) == 20


def test_the_driver_refuses_what_no_launcher_takes(launches: list[tuple[Any, ...]]) -> None:
    """The double takes what Triton passes, and no single change of that."""
    from pcomm.nvls.collectives.reductions import all_reduce_launch, all_reduce_question

    with fake_workspace(SIZE) as workspace:
        choice = workspace.choose(all_reduce_question(X, workspace, "p2p"))
        launch = all_reduce_launch(workspace, choice, torch.empty_like(X), X)
        runner = workspace.launcher.runner(launch)
        values = values_of(launch)
        good = [*runner.grid, 7, *runner.behind, *values]
        launches.clear()
        runner.start(*good)
        launch.run()  # by Triton
        assert launches[0] == launches[1]
        workspace.launcher.run(replace(launch, num_blocks=launch.num_blocks // 2))
        names = ["x", "y", "z", "stream", "function", "metadata", "told", "enter", "leave"]
        names += launch.kernel.arg_names
        for name, bad in {
            "x": (0, 4.0, True),
            "y": (65536,),
            "stream": (None, -1),
            "function": (None, 0, good[4] + 16, float(good[4])),
            "metadata": (None, (4, 1), (good[5][0] + 1, *good[5][1:])),
            "out": (0.5, None, True, good[names.index("out")] + 8),
            "num_vectors": (1 << 31, 1.0),
            "buffers": (0, values[3].to(torch.int32), values[3][:0]),
            "WORLD": (SIZE + 1, None),
        }.items():
            for value in bad:
                changed = list(good)
                changed[names.index(name)] = value
                with pytest.raises(TypeError):
                    runner.start(*changed)
        for changed in (good[:-1], [*good, 0]):
            refused(TypeError, "parameters", runner.start, *changed)
    assert [one[1] for one in launches] == [good[0], good[0], good[0] // 2]


@pytest.mark.parametrize("slot", [1, 8, 16, 4096, 1 << 33, (1 << 33) + 8])
def test_arguments_of_another_kind_take_another_variant(launches, slot):
    """An oracle: Triton's own binding finds the variant that the launcher has compiled."""
    from pcomm.nvls.collectives.reductions import all_reduce_launch, all_reduce_question

    with fake_workspace(SIZE) as workspace:
        choice = workspace.choose(all_reduce_question(X, workspace, "p2p"))
        first = all_reduce_launch(workspace, choice, torch.empty_like(X), X)
        workspace.launcher.run(first)
        for other in (8, 4096, (1 << 33) + 8, 1 << 33):
            workspace.launcher.run(replace(first, arguments={**first.arguments, "slot": other}))
        compiled_before = workspace.launcher.num_compiled
        launch = replace(first, arguments={**first.arguments, "slot": slot})
        workspace.launcher.run(launch)
        variants = variants_of(launch)
        number = len(variants)
        launch.run()
        assert len(variants) == number
        assert workspace.launcher.num_compiled == compiled_before + 2 * (slot == 1)


@pytest.mark.parametrize("algo", ["multimem", "p2p"])
def test_the_launcher_takes_the_variant_that_triton_takes(launches, algo):
    """An oracle: Triton's own binding of the same arguments compiles nothing new."""
    from pcomm.nvls.collectives.gathers import all_gather_launch, all_gather_question

    with fake_workspace(SIZE) as workspace:
        for rows in (1, 2, 16, 17, 64):
            x = torch.zeros(rows, 8, dtype=torch.bfloat16)
            out = torch.zeros(SIZE * rows, 8, dtype=torch.bfloat16)
            choice = workspace.choose(all_gather_question(x, 0, workspace, algo))
            launch = all_gather_launch(workspace, choice, out, x, 0)
            workspace.launcher.run(launch)
            variants = variants_of(launch)
            number, ours = len(variants), launches[-1]
            launch.run()
            assert len(variants) == number
            assert launches[-1] == ours
