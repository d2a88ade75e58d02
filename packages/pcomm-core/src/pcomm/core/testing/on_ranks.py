"""`@ranks(n)`: a test function that runs on ranks, and the default process group of a test."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.groups.communicators import communicator_of
from pcomm.core.process.local_ranks import LocalRanks, RankError
from pcomm.core.testing.assertions import Living, left_behind, poisoned_memory
from pcomm.core.testing.programs import rank_limit_s

__all__ = ["RankPool", "default_collectives", "default_group", "ranks", "run_twin"]


# Much of torch is imported when it is used first, which takes each new rank two seconds.
_PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)


@dataclass
class RankPool:
    """Warm ranks, kept between tests; those of a test that failed are thrown away.

    A test that leaves threads or communicators in a rank is one that failed, so no test meets what
    another one left.
    """

    _warm: dict[int, LocalRanks] = field(default_factory=dict)

    def run(self, task: Callable[..., Any], size: int, *args: object) -> list[Any]:
        """Call `task(*args)` on `size` ranks and return what each returned; see `LocalRanks.run`.

        Tasks are those of modules, not of the program's own file, which is pytest's. One may take
        `PCOMM_RANKS_TIMEOUT_S` seconds, and longer where the machine is busy.
        """
        if size not in self._warm or not self._warm[size].is_usable:
            self._warm[size] = LocalRanks(size, preload=_PRELOADED, imports_main=False)
        return self._warm[size].run(task, args, timeout_s=rank_limit_s())

    def discard(self, size: int) -> None:
        """Stop the ranks of worlds of this size; the next test gets new ones."""
        if size in self._warm:
            self._warm.pop(size).close()

    def close(self) -> None:
        """Stop all ranks."""
        for warm in self._warm.values():
            warm.close()
        self._warm.clear()


def ranks(size: int, *, leaves: str = "") -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Run a test on `size` local ranks, each in a process of its own with a gloo world.

    The first parameter of the test gets the rank; the others are fixtures or parameters as
    usual, and have to pickle. Fresh memory is filled with NaN, and torch uses one thread.

        @ranks(2)
        def test_all_reduce_adds(rank: int) -> None:
            ...

    The test fails if threads or communicators that it made live on after it, although cycles are
    collected: something of what it tests is never freed.

    Args:
        size: Number of ranks.
        leaves: Reason why something lives on although the tested code is right, such as a cache
            of torch. Then the test passes, and its ranks are not used again.
    """

    def decorate(function: Callable[..., object]) -> Callable[..., None]:
        parameters = list(inspect.signature(function).parameters.values())

        def on_all_ranks(rank_pool: RankPool, **arguments: object) -> None:
            try:
                rank_pool.run(_run_test, size, _Test.of(function), arguments, not leaves)
            except RankError as problem:
                report = str(problem)
            else:
                if leaves:
                    rank_pool.discard(size)
                return
            # Imported here: the module is part of the wheel, which does not require pytest.
            import pytest

            # The frames of this process would stand above the traceback that matters.
            pytest.fail(report, pytrace=False)

        functools.update_wrapper(on_all_ranks, function)
        # pytest reads the signature: the rank comes from here, the pool from its fixture.
        pool = inspect.Parameter("rank_pool", inspect.Parameter.KEYWORD_ONLY)
        rest = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters[1:]]
        on_all_ranks.__signature__ = inspect.Signature([*rest, pool])  # type: ignore[attr-defined]
        del on_all_ranks.__wrapped__  # type: ignore[attr-defined]
        on_all_ranks.on_each_rank = function  # type: ignore[attr-defined]
        return on_all_ranks

    return decorate


@dataclass(frozen=True)
class _Test:
    """Where a test function stands; test files are not importable by name in another process."""

    path: str
    name: str

    @classmethod
    def of(cls, function: Callable[..., object]) -> _Test:
        return cls(inspect.getfile(function), function.__qualname__)

    def load(self) -> Callable[..., object]:
        # The module keeps a name of its own, so that what it defines can be pickled.
        module_name = "pcomm_ranks_" + hashlib.sha1(self.path.encode()).hexdigest()[:12]
        module = sys.modules.get(module_name)
        if module is None:
            spec = importlib.util.spec_from_file_location(module_name, self.path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module
            spec.loader.exec_module(module)
        found: Any = module
        for part in self.name.split("."):
            found = getattr(found, part)
        function: Callable[..., object] = found.on_each_rank
        return function


def _run_test(test: _Test, arguments: dict[str, object], must_be_clean: bool) -> None:
    folder = str(Path(test.path).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    function = test.load()
    before = Living.now()
    with poisoned_memory():
        try:
            function(dist.get_rank(), **arguments)
        except AssertionError as error:
            # pytest rewrites assertions only in its own process, so the values are added here.
            error.add_note(_values(error, test.path))
            raise
    if not must_be_clean:
        return
    _end_groups(before)
    left = left_behind(before)
    assert not left, f"{test.name} leaves behind {', '.join(left)}"


def _end_groups(before: Living) -> None:
    """End what the test made with torch's own functions and did not close: the next task would."""
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        if name not in before.names_of_groups:
            dist.destroy_process_group(group)
        else:
            communicator_of(group).rest()


def _values(error: AssertionError, path: str) -> str:
    """The local variables where the test, or a function of its file, failed."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    frame = [frame for frame in frames if frame.f_code.co_filename == path][-1]
    lines = [f"    {name} = {_cut(repr(value))}" for name, value in frame.f_locals.items()]
    return "\n".join([f"where {frame.f_code.co_name} has", *lines])


def _cut(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:400]}..."


def default_group() -> dist.ProcessGroup:
    """The group of all ranks, which `@ranks` has opened. Local."""
    group = dist.group.WORLD
    assert group is not None
    return group


def default_collectives() -> Collectives:
    """The collectives of that group, without gradients. Local."""
    return communicator_of(default_group()).collectives


def run_twin(
    collectives: Collectives, name: str, is_async: bool, x: Tensor, **options: Any
) -> Tensor:
    """The result of a named method, or of its asynchronous twin. Collective.

    Args:
        collectives: Collectives that carry it out.
        name: Name of the method that blocks.
        is_async: True for its twin, which is waited for here.
        x: Input tensor, of any shape.
        options: Further arguments of the method.
    """
    if is_async:
        result: Tensor = getattr(collectives, f"{name}_async")(x, **options).wait()
    else:
        result = getattr(collectives, name)(x, **options)
    return result
