"""The options of a communicator: those asked for, and those that the backend grants."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pcomm.core.errors import ConfigError, UnsupportedError

__all__ = ["CommOptions", "Granted", "Rails", "grant"]


class Rails:
    """Numbers for the interfaces of one rank's groups, in the order in which they are named.

    Nodes may name their interfaces differently. Their ranks must agree on which groups have the
    same one, since those can share a communicator.
    """

    def __init__(self) -> None:
        self._numbers: dict[str | None, int] = {}

    def number(self, interface: str | None) -> int:
        """The number of `interface`, the next one if it was not named before; None counts too."""
        return self._numbers.setdefault(interface, len(self._numbers))


@dataclass(frozen=True)
class CommOptions:
    """Wishes for one communicator; None leaves a field to the backend.

    Fields are set on the communicator itself, never through environment variables, which would
    apply to every communicator that is created while they are set.

    Args:
        timeout_s: Seconds after which a collective that does not finish is an error.
        threads: Worker threads of a gloo communicator, and as many connections between two ranks.
            Torch's default is 2, so that one group runs two collectives at once; 1 gives the
            in-order queue that NCCL has. Large gathers and reduce-scatters go between pairs of
            ranks without these threads, and begin in order whatever their number.
        interface: Network interface of a gloo communicator, such as `"eth1"`: its rail. Each node
            may name its own; groups that have the same one on a node have it on all.
        high_priority: NCCL: launch on a high-priority stream.
        min_ctas: NCCL: fewest thread blocks a collective uses.
        max_ctas: NCCL: most thread blocks a collective uses.
        cga_cluster_size: NCCL: thread blocks that form a cluster.
        collnet: NCCL: allow in-network reduction (SHARP) on this communicator.
        traffic_class: NCCL: network traffic class.
        strict: Raise if a field that was asked for is not granted.
    """

    timeout_s: float | None = None
    threads: int | None = None
    interface: str | None = None
    high_priority: bool | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    cga_cluster_size: int | None = None
    collnet: bool | None = None
    traffic_class: int | None = None
    strict: bool = False

    @property
    def asked(self) -> dict[str, Any]:
        """The fields that were set, by name."""
        fields = dataclasses.asdict(self)
        del fields["strict"]
        return {name: value for name, value in fields.items() if value is not None}

    def describe(self, rails: Rails) -> str:
        """One line of all that must be the same on all ranks of a group. Local.

        Args:
            rails: Rails of the groups that are opened together.
        """
        asked = {name: value for name, value in self.asked.items() if name != "interface"}
        strictly = ", strict" if self.strict else ""
        return f"options {asked}{strictly}, rail {rails.number(self.interface)}"


@dataclass(frozen=True)
class Granted:
    """The options that a backend took from `CommOptions`.

    Args:
        backend: Name to give to `torch.distributed.new_group`.
        fields: Options that are in force.
        refused: Options that are not, each with the reason.
        pg_options: Options object of the backend, or None.
    """

    backend: str
    fields: Mapping[str, Any]
    refused: Mapping[str, str]
    pg_options: Any = None

    @property
    def timeout(self) -> timedelta | None:
        """`timeout_s` as torch wants it."""
        seconds = self.fields.get("timeout_s")
        return None if seconds is None else timedelta(seconds=seconds)


_GLOO = ("threads", "interface")
_NOT_NCCL = {
    "threads": "nccl has no worker threads",
    "interface": "nccl takes interfaces from the environment, for all communicators at once",
}

# Field of CommOptions -> field of torch's ncclConfig. Which of them exist depends on the torch
# build, so each is tried and reported.
_NCCL_CONFIG = {
    "min_ctas": "min_ctas",
    "max_ctas": "max_ctas",
    "cga_cluster_size": "cga_cluster_size",
    "collnet": "collnet_enable",
    "traffic_class": "traffic_class",
}


def grant(options: CommOptions, backend: str, *, group: str) -> Granted:
    """Decide which options `backend` can honour, without creating anything. Local.

    Args:
        options: Options asked for.
        backend: `"gloo"` or `"nccl"`; others get the timeout alone.
        group: Name of the group, for the error.

    Raises:
        ConfigError: A number of threads or of seconds is none that a communicator can have.
        UnsupportedError: With `strict`, if a field cannot be granted; it names each and why.
    """
    asked = options.asked
    _check_numbers(asked, group)
    refused: dict[str, str] = {}
    pg_options: Any = None
    if backend == "nccl":
        pg_options, refused = _nccl_options(asked)
    else:
        for name in asked:
            if name != "timeout_s" and (name not in _GLOO or backend != "gloo"):
                refused[name] = f"{backend} has no such option"
    fields = {name: value for name, value in asked.items() if name not in refused}
    if refused and options.strict:
        raise UnsupportedError(
            f"open_groups: group {group!r} with {asked}",
            found="; ".join(f"{name}: {reason}" for name, reason in refused.items()),
            why="strict=True asks for every option to be in force.",
            fix="Leave the option away, or strict=False to see it as refused in explain().",
        )
    name = backend
    if any(option in fields for option in _GLOO):
        name = _register_gloo(fields.get("threads"), fields.get("interface"))
    return Granted(name, fields, refused, pg_options)


def _check_numbers(asked: Mapping[str, Any], group: str) -> None:
    # Gloo accepts 0 threads, and then no thread works on its queue.
    threads, timeout_s = asked.get("threads", 1), asked.get("timeout_s", 1.0)
    is_count = isinstance(threads, int) and threads >= 1
    is_time = isinstance(timeout_s, int | float) and math.isfinite(timeout_s) and timeout_s > 0
    if is_count and is_time:
        return
    raise ConfigError(
        f"open_groups: group {group!r} with {asked}",
        found=f"timeout_s={timeout_s!r}" if is_count else f"threads={threads!r}",
        why="Without a worker thread no operation ends, and without time none can.",
        fix="Give a whole number of threads from 1 on and seconds above 0, or None for the "
        "backend's own.",
    )


def _nccl_options(asked: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    refused = {name: reason for name, reason in _NOT_NCCL.items() if name in asked}
    if not hasattr(dist, "ProcessGroupNCCL"):
        wanted = [name for name in asked if name not in ("timeout_s", *refused)]
        return None, refused | dict.fromkeys(wanted, "this torch build has no NCCL")
    pg_options = dist.ProcessGroupNCCL.Options()
    pg_options.is_high_priority_stream = bool(asked.get("high_priority", False))
    for name, field in _NCCL_CONFIG.items():
        if name not in asked:
            continue
        if hasattr(pg_options.config, field):
            setattr(pg_options.config, field, int(asked[name]))
        else:
            refused[name] = f"this torch build's NCCL configuration has no field {field}"
    return pg_options, refused


def _register_gloo(threads: int | None, interface: str | None) -> str:
    """Name of a torch backend that is gloo with these options.

    `new_group` hands gloo no options, so others than the usual ones need a backend of their own.
    """
    name = "gloo"
    name += "" if threads is None else f"_{threads}_threads"
    name += "" if interface is None else f"_on_{interface}"
    if name in dist.Backend.backend_list:
        return name

    def create(common: Any, _: Any) -> Any:
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()  # type: ignore[attr-defined]
        if threads is not None:
            options._threads = threads
        options._timeout = common.timeout
        # Looked up when the communicator is made, so in the network namespace that then holds.
        options._devices = [
            gloo.create_default_device()
            if interface is None
            else gloo.create_device(interface=interface)
        ]
        return gloo(common.store, common.group_rank, common.group_size, options)

    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
    return name
