"""A backend of torch.distributed whose sums and gathers are kernels of this package.

`register_backend()` makes the name "nvls" known. Torch takes a process group that a creator returns
for the whole one, also where it has made backends for other devices, so `NvlsProcessGroup` makes
gloo and NCCL itself. A collective that has a kernel takes it, and every other one goes on to these.
Programs that know torch.distributed alone, functional collectives and DTensor too, need no change
but the name.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from logging import getLogger
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from pcomm.core.errors import ConfigError, near_misses
from pcomm.core.groups.group import Group
from pcomm.nvls._capability import default_device
from pcomm.nvls._nvls_collectives import DEFAULT_MAX_BYTES
from pcomm.nvls.collectives.gathers import all_gather_into_tensor, all_gather_question
from pcomm.nvls.collectives.reductions import (
    all_reduce,
    all_reduce_question,
    reduce_scatter_question,
    reduce_scatter_tensor,
)
from pcomm.nvls.policy.choose import CollectiveRequest
from pcomm.nvls.policy.table import OPERATIONS
from pcomm.nvls.workspace.memory import check_numbers
from pcomm.nvls.workspace.slots import SLOTS
from pcomm.nvls.workspace.workspace import Workspace

__all__ = ["NvlsProcessGroup", "register_backend"]

_NAME = "nvls"
_SEVERAL = "several tensors in one call"


def register_backend(max_bytes: int = DEFAULT_MAX_BYTES, **options: Any) -> None:
    """Make "nvls" a backend of torch.distributed in this process. Local; every rank calls it.

    After it `init_process_group("cpu:gloo,cuda:nvls")`, `new_group(backend="nvls")` and device
    meshes over such groups return an `NvlsProcessGroup`. Sums, all-gathers and reduce-scatters that
    have a kernel take it; all else goes to the gloo or NCCL of the group. Called again, it
    changes the options of groups that are made from then on.

    Each group opens a workspace in its first collective that may have a kernel, and closes it in
    `destroy_process_group`; both are collective over the group.

    Args:
        max_bytes: Size of the largest tensor of a kernel, in bytes; equal on all ranks.
        options: Further arguments of `Workspace`, equal on all ranks, such as `deterministic`. An
            operation waits as long as the process group does, unless `timeout_s` is among them.
            The device is that of the first tensor, unless it is given.

    Raises:
        ConfigError: An option that `Workspace` has not, or a number that it cannot use; or another
            package has a backend of that name.
    """
    known = [name for name in inspect.signature(Workspace).parameters if name not in _NO_OPTIONS]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ConfigError(
            f"register_backend: {unknown[0]}={options[unknown[0]]!r}",
            found="no option of a workspace",
            why="Each process group opens a workspace with these options.",
            fix=near_misses(unknown[0], known),
        )
    numbers = {"slots": SLOTS, "lamport_bytes": 0, "timeout_s": 1.0, **options}
    check_numbers(max_bytes, numbers["slots"], numbers["lamport_bytes"], numbers["timeout_s"])
    other = dist.Backend._plugins.get(_NAME.upper())
    if other is not None and type(other.creator_fn).__module__ != __name__:
        raise ConfigError(
            f"register_backend: {_NAME!r}",
            found=f"a backend of that name, made by {other.creator_fn!r}",
            why="Torch would hand the groups of that package to this one.",
            fix="Do not register the other backend in this process.",
        )
    creator = _Creator({"max_bytes": max_bytes, **options})
    dist.Backend.register_backend(_NAME, creator, extended_api=True, devices=["cpu", "cuda"])


# The process group gives these.
_NO_OPTIONS = ("group", "control", "probe", "stream")


class _Creator:
    """What torch calls for each new process group."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

    def __call__(self, common: Any, backend_options: Any) -> NvlsProcessGroup:
        return NvlsProcessGroup(common, backend_options, self._options)


class NvlsProcessGroup(dist.ProcessGroup):
    """A process group whose collectives are kernels where they can be. Made by torch.

    It is what `dist.group.WORLD`, `new_group` and `DeviceMesh.get_group` return. Which collectives
    take a kernel depends on their shapes, dtype and arguments, and on what the ranks of the group
    can do together, so all ranks choose alike; that gradients are recorded changes nothing, since
    here as in other backends autograd stands above a collective. An all-reduce or reduce-scatter is
    the same in bits as gloo's between two ranks, and rounded once in fp32 among more.

    It is there once all ranks have connected, so that one of them may close it at once.

    Args:
        common: Store, rank, size and time limit, as torch gives them to a creator.
        backend_options: Options of NCCL, or None.
        options: Arguments of `Workspace`.

    Attributes:
        taken: Number of collectives of this rank that took a kernel, by name and algorithm.
        passed: Number of the others, by name and reason.
    """

    def __init__(self, common: Any, backend_options: Any, options: Mapping[str, Any]) -> None:
        # The other form, with a store, makes an object that cannot be a subclass.
        super().__init__(common.group_rank, common.group_size)  # type: ignore[call-arg]
        limit_s = common.timeout.total_seconds()
        self._options = {"timeout_s": limit_s, **options}
        self._store = common.store
        self.taken: Counter[tuple[str, str]] = Counter()
        self.passed: Counter[tuple[str, str]] = Counter()
        self._workspace: Workspace | None = None
        self._coalesces = False
        device = options.get("device")
        self._device_type = default_device().type if device is None else torch.device(device).type
        self._ordinary = dist.ProcessGroup(self._store, common.group_rank, common.group_size)
        kind = dist.ProcessGroup.BackendType
        on_nccl = dist.is_nccl_available() and torch.cuda.is_available()
        backends: list[tuple[str, Any, Any]] = [("cpu", kind.GLOO, _gloo(common))]
        if on_nccl:
            backends.append(("cuda", kind.NCCL, _nccl(common, backend_options)))
        # What is not overridden here, such as the question for a device, finds them in this group.
        for group in (self, self._ordinary):
            for name, backend_type, backend in backends:
                group._register_backend(torch.device(name), backend_type, backend)
            group._set_default_backend(kind.NCCL if on_nccl else kind.GLOO)
        _wait_until_connected(self._store, common.group_size, common.timeout)

    def getBackendName(self) -> str:
        """The name of the backend, as torch asks for it."""
        return _NAME

    # -- what has kernels ----------------------------------------------------------------

    # Torch's stubs name other arguments than its functions take; these pass on what comes.

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """The sum of a tensor in its place, or another reduction; see `dist.all_reduce`."""
        x, opts = _only(tensors), _options(args, kwargs)
        if x is None:
            self.passed["all_reduce", _SEVERAL] += 1
        elif self._takes("all_reduce", x, x, all_reduce_question, _not_sum(opts)):
            workspace = self._workspace_in_order()
            y = x.detach()
            all_reduce(y, out=y, workspace=workspace)
            return KernelWork([x], opts)
        return self._ordinary.allreduce(tensors, *args, **kwargs)

    def all_gather_single(self, output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The shards of all ranks in one tensor; see `dist.all_gather_into_tensor`."""
        n, name = self.size(), "all_gather_into_tensor"
        reason = "" if _fits(output, input, n) else "the sizes or types of the tensors differ"
        if self._takes(name, input, output, _gather_question, reason):
            workspace = self._workspace_in_order()
            flat = _flat(output)
            all_gather_into_tensor(input.detach().reshape(-1), out=flat, workspace=workspace)
            _store(flat, output)
            return KernelWork([output], _options(args, kwargs))
        call = _method(self._ordinary, "all_gather_single", "_allgather_base")
        return call(output, input, *args, **kwargs)

    def reduce_scatter_single(  # type: ignore[override]
        self, output: Tensor, input: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """This rank's segment of a sum; see `dist.reduce_scatter_tensor`."""
        n, name, opts = self.size(), "reduce_scatter_tensor", _options(args, kwargs)
        reason = "" if _fits(input, output, n) else "the sizes or types of the tensors differ"
        if self._takes(name, input, output, _scatter_question, reason or _not_sum(opts)):
            workspace = self._workspace_in_order()
            flat = _flat(output)
            reduce_scatter_tensor(input.detach().reshape(-1), out=flat, workspace=workspace)
            _store(flat, output)
            return KernelWork([output], opts)
        call = _method(self._ordinary, "reduce_scatter_single", "_reduce_scatter_base")
        return call(output, input, *args, **kwargs)

    # Functional collectives, and so DTensor, ask for several tensors, and have one.

    def all_gather_single_coalesced(  # type: ignore[override]
        self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """All-gathers of several tensors; a single one as `all_gather_single` does it."""
        output, x = _only(outputs), _only(inputs)
        if output is not None and x is not None:
            return self.all_gather_single(output, x, *args, **kwargs)
        names = "all_gather_single_coalesced", "allgather_into_tensor_coalesced"
        call = _method(self._ordinary, *names)
        self.passed["all_gather_coalesced", _SEVERAL] += 1
        return call(outputs, inputs, *args, **kwargs)

    def reduce_scatter_single_coalesced(  # type: ignore[override]
        self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Reduce-scatters of several tensors; a single one as `reduce_scatter_single` does it."""
        output, x = _only(outputs), _only(inputs)
        if output is not None and x is not None:
            return self.reduce_scatter_single(output, x, *args, **kwargs)
        names = "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
        call = _method(self._ordinary, *names)
        self.passed["reduce_scatter_coalesced", _SEVERAL] += 1
        return call(outputs, inputs, *args, **kwargs)

    # The names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    # -- lifetime ------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        # Between these two NCCL sends nothing: a kernel would come before what was called first.
        self._coalesces = True
        self._ordinary._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        self._coalesces = False
        return self._ordinary._end_coalescing(device)

    def set_timeout(self, timeout: timedelta) -> None:
        """The time limit of gloo and NCCL from now on; a workspace keeps the one it has."""
        self._ordinary.set_timeout(timeout)

    def shutdown(self) -> None:
        """Close the workspace and end the backends; `destroy_process_group` calls it. Collective.

        A rank that does not come, or a store that has gone, is waited for as long as
        `PCOMM_TIMEOUT_S` says, and then a warning of the log: nothing else could be done here.
        """
        workspace, self._workspace = self._workspace, None
        if workspace is not None:
            try:
                workspace.close()
            except Exception as problem:  # any: the backends have to end, too
                first_line = str(problem).partition("\n")[0]
                getLogger(__name__).warning("closing the workspace of a group: %s", first_line)
        self._ordinary.shutdown()

    def abort(self) -> None:
        """End the backends and what is in flight in them. Local; kernels have their time limit."""
        self._ordinary.abort()

    # -- what was done -------------------------------------------------------------------

    def explain(self) -> str:
        """How many collectives of this rank took a kernel, and why each other one did not. Local.

        Returns:
            A line for each name with its algorithm or its reason, the most frequent first.
        """
        kernels, others = sum(self.taken.values()), sum(self.passed.values())
        lines = [f"{kernels} of {kernels + others} collectives took a kernel"]
        lines += [f"  {n} {name}: {algorithm}" for (name, algorithm), n in self.taken.most_common()]
        lines += [f"  {n} {name}: not, {reason}" for (name, reason), n in self.passed.most_common()]
        return "\n".join(lines)

    # -- how it is done ------------------------------------------------------------------

    def _takes(
        self,
        name: str,
        x: Tensor,
        output: Tensor,
        question: Callable[[Tensor, Workspace], CollectiveRequest],
        reason: str,
    ) -> bool:
        """Whether the workspace carries it out; counts it. Collective where it is the first one.

        One that takes a kernel does, and a sum in the order of the ranks, with or without a kernel.
        It looks at nothing that one rank can have by itself: strides and gradients are not asked
        for, since a rank that chose by them would wait for the others for ever.
        """
        reason, is_ordered = reason or self._reason_against(x, output), False
        if not reason:
            workspace = self._opened(x.device)
            asked = question(x, workspace)
            choice = workspace.choose(asked)
            if choice.algorithm != "dist":
                self.taken[name, choice.algorithm] += 1
                return True
            reason = "; ".join(choice.reasons) or choice.because
            is_ordered = asked.deterministic and OPERATIONS[asked.operation].reduces
        self.passed[name, reason] += 1
        return is_ordered

    def _reason_against(self, x: Tensor, output: Tensor) -> str:
        if self.size() == 1:
            return "one rank has nothing to move"
        if self._coalesces:
            return "it is one of several that are issued together"
        if x.device.type != self._device_type:
            return f"a tensor on {x.device.type}, and kernels are for {self._device_type}"
        if x.layout is not torch.strided or output.layout is not torch.strided:
            return f"a tensor of layout {x.layout}"
        if not x.numel():
            return "a tensor without numbers"
        if self._workspace is None and x.is_cuda and torch.cuda.is_current_stream_capturing():
            return "the first collective of a group opens its workspace, which no CUDA graph can"
        return ""

    def _opened(self, device: torch.device) -> Workspace:
        if self._workspace is None:
            if self._device_type == "cuda":
                self._tell_symmetric_memory()
            group = Group.from_process_group(f"{_NAME} {self.group_name}", self)
            self._workspace = Workspace(group, **{"device": device, **self._options})
        return self._workspace

    def _tell_symmetric_memory(self) -> None:
        """Name the store in which GPUs exchange handles: torch finds none in a subclass. Local."""
        store = dist.PrefixStore("symmetric_memory/", self._store)
        tell = torch._C._distributed_c10d._SymmetricMemory.set_group_info
        # It is told once for each name.
        with suppress(RuntimeError):
            tell(self.group_name, self.rank(), self.size(), store)

    def _workspace_in_order(self) -> Workspace:
        workspace = self._workspace
        assert workspace is not None
        # Programs call from several streams; what was launched before stays before.
        workspace.streams.follow()
        return workspace


def _passing(name: str) -> Callable[..., Any]:
    def collective(self: NvlsProcessGroup, *args: Any, **kwargs: Any) -> Any:
        self.passed[name, "no kernel does this"] += 1
        return getattr(self._ordinary, name)(*args, **kwargs)

    collective.__name__ = name
    collective.__doc__ = f"`{name}` of the process group behind this one, counted."
    return collective


for _name in (
    "allgather",
    "allreduce_coalesced",
    "all_to_all_single",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
):
    if hasattr(dist.ProcessGroup, _name):
        setattr(NvlsProcessGroup, _name, _passing(_name))


class KernelWork(dist.Work):
    """A collective whose kernel is on the stream that it was called on, and overlaps nothing there.

    Args:
        tensors: Results of the operation.
        opts: Options of the call; a call that blocks needs no event.
    """

    def __init__(self, tensors: list[Tensor], opts: Any) -> None:
        super().__init__()
        self._tensors = tensors
        self._event: torch.cuda.Event | None = None
        if tensors[0].is_cuda and getattr(opts, "asyncOp", True):
            self._event = torch.cuda.current_stream(tensors[0].device).record_event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Have the current stream wait for it; the host does not. Local."""
        if self._event is not None:
            torch.cuda.current_stream(self._tensors[0].device).wait_event(self._event)
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the device has ended it."""
        return self._event is None or self._event.query()

    def is_success(self) -> bool:
        """As `is_completed`: what fails raises in its call, or in the next one of the group."""
        return self.is_completed()

    def result(self) -> list[Tensor]:
        """Its results."""
        return self._tensors

    def get_future(self) -> Future[list[Tensor]]:
        """A future of its results, in the order of the current stream."""
        self.wait()
        x = self._tensors[0]
        future: Future[list[Tensor]] = Future(devices=[x.device] if x.is_cuda else None)
        future.set_result(self._tensors)
        return future


def _wait_until_connected(store: Any, size: int, timeout: timedelta) -> None:
    """Return once all ranks have come here, with their connections. Collective.

    Gloo returns on a rank as soon as that one is connected. If it closed its end then, a slower
    rank would find its own connection broken, and raise. Torch can wait likewise, and does not
    unless TORCH_DIST_INIT_BARRIER is set; beside connections between all ranks it costs little.
    """
    number = store.add("ranks that have connected", 1)
    # A store that outlives the group may be that of another one of the same name.
    told = f"all have connected {(number - 1) // size}"
    if number % size == 0:
        store.set(told, "")
    store.wait([told], timeout)


def _gloo(common: Any) -> Any:
    backend = dist.ProcessGroupGloo(
        dist.PrefixStore("gloo/", common.store),
        common.group_rank,
        common.group_size,
        timeout=common.timeout,
    )
    backend.options.global_ranks_in_group = common.global_ranks_in_group
    backend.options.group_name = common.group_id
    backend._set_sequence_number_for_group()
    return backend


def _nccl(common: Any, options: Any) -> Any:
    options = dist.ProcessGroupNCCL.Options() if options is None else options
    options._timeout = common.timeout
    options.global_ranks_in_group = common.global_ranks_in_group
    options.group_name = common.group_id
    store = dist.PrefixStore("nccl/", common.store)
    backend = dist.ProcessGroupNCCL(store, common.group_rank, common.group_size, options)
    backend._set_sequence_number_for_group()
    return backend


def _only(tensors: Any) -> Tensor | None:
    """The tensor of a call that has one; None for several."""
    if isinstance(tensors, Tensor):
        return tensors
    return tensors[0] if len(tensors) == 1 else None


def _options(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Options of a call, a reduction alone, or None."""
    return kwargs.get("opts", kwargs.get("op", args[0] if args else None))


def _not_sum(opts: Any) -> str:
    """Why a reduction has no kernel; empty for a sum."""
    operation = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    return "" if operation == dist.ReduceOp.SUM else "kernels add, and do nothing else"


def _fits(whole: Tensor, part: Tensor, size: int) -> bool:
    """Whether a tensor has the numbers of `size` parts; torch refuses others on all ranks."""
    same = whole.dtype == part.dtype and whole.device == part.device
    return same and whole.numel() == size * part.numel()


def _gather_question(x: Tensor, workspace: Workspace) -> CollectiveRequest:
    return all_gather_question(x, 0, workspace)


def _scatter_question(x: Tensor, workspace: Workspace) -> CollectiveRequest:
    return reduce_scatter_question(x, 0, workspace)


def _flat(output: Tensor) -> Tensor:
    """Memory for the numbers of a result: its own where that is dense."""
    output = output.detach()
    return output.view(-1) if output.is_contiguous() else output.new_empty(output.numel())


def _store(flat: Tensor, output: Tensor) -> None:
    if flat.data_ptr() != output.data_ptr():
        output.detach().copy_(flat.view(output.shape))


def _method(group: dist.ProcessGroup, *names: str) -> Callable[..., Any]:
    """The first of several names that this torch has."""
    found: Callable[..., Any] = getattr(group, next(n for n in names if hasattr(group, n)))
    return found
