"""What is asked for one group: its ranks, role and options, and what the backend grants of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch.distributed as dist

from pcomm.core.control.control import format_ranks
from pcomm.core.errors import ConfigError, UnsupportedError

__all__ = ["CommOptions", "CtaPolicy", "Granted", "GroupSpec", "Rails", "grant"]

CtaPolicy = Literal["default", "efficiency", "zero"]


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
        cta_policy: NCCL: how many thread blocks it takes from what computes meanwhile. `"zero"`
            gives gathers to the copy engines where it can, which is on memory that was registered
            as symmetric; `"efficiency"` takes as few as reach the full speed. Has not run on
            hardware.
        nvls_ctas: NCCL: thread blocks of collectives through the switch (NVLS).
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
    cta_policy: CtaPolicy | None = None
    nvls_ctas: int | None = None
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
class GroupSpec:
    """A group to open: its axes or its ranks, role, options and backend.

    Args:
        axes: Axis names joined by `_`, with a view prefix if needed: `"dp_cp"`, `"expert.ep"`. For
            a group of explicit ranks, its name.
        role: Groups over the same ranks with different roles have communicators of their own.
        options: Wishes for the communicator.
        backend: `"gloo"` or `"nccl"` for this group alone, such as gloo for the control plane of
            a job on GPUs; empty for that of `open_groups`.
        ranks: Global ranks of a group of explicit ranks (`of_ranks`), kept ascending; None for one
            that runs along axes.
    """

    axes: str
    role: str = ""
    options: CommOptions = CommOptions()
    backend: str = ""
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.ranks is not None:
            object.__setattr__(self, "ranks", tuple(sorted(self.ranks)))

    @classmethod
    def of_ranks(
        cls,
        ranks: Sequence[int],
        name: str,
        role: str = "",
        *,
        options: CommOptions | None = None,
        backend: str = "",
    ) -> GroupSpec:
        """A group of explicit ranks, for sets that no axes describe. Local; nothing is checked yet.

        Every rank that calls `open_groups` lists it, members or not, since all agree on the list.
        A rank that does not belong makes no communicator for it and has no such key. Several may
        share ranks, and one rank alone is the identity.

        Args:
            ranks: Global ranks, in any order, each once.
            name: Key of the group, `groups[name]`, or `groups[name, role]`; not that of axes.
            role: Purpose of its communicator.
            options: Wishes for the communicator.
            backend: `"gloo"` or `"nccl"`; empty for that of `open_groups`.
        """
        return cls(name, role, options or CommOptions(), backend, tuple(ranks))

    def describe(self, rails: Rails) -> str:
        """One line that is the same on all ranks that can open this group together. Local."""
        of_ranks = "" if self.ranks is None else f" of ranks {format_ranks(self.ranks)}"
        parts = [f"group {self.axes}{of_ranks}", f"role {self.role!r}"]
        parts.append(self.options.describe(rails))
        if self.backend:
            parts.append(f"backend {self.backend}")
        return ", ".join(parts)


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


def grant(options: CommOptions, backend: str, *, group: str) -> Granted:
    """Decide which options `backend` can honour, without creating anything. Local.

    Args:
        options: Options asked for.
        backend: `"gloo"` or `"nccl"`; others get the timeout alone.
        group: Name of the group, for the error.

    Raises:
        ConfigError: A number of threads or of seconds, or a policy, is none that a communicator
            can have.
        UnsupportedError: With `strict`, if a field cannot be granted; it names each and why.
    """
    asked = options.asked
    _check_values(asked, group)
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
    "cta_policy": "cta_policy",
    "nvls_ctas": "nvls_ctas",
}
# As nccl.h numbers them.
_CTA_POLICIES: Mapping[str, int] = {"default": 0, "efficiency": 1, "zero": 2}


def _check_values(asked: Mapping[str, Any], group: str) -> None:
    policy, known = asked.get("cta_policy"), get_args(CtaPolicy)
    if policy is not None and policy not in known:
        raise ConfigError(
            f"open_groups: group {group!r} with {asked}",
            found=f"cta_policy={policy!r}",
            why="NCCL knows no other policy.",
            fix=f"Give one of {', '.join(known)}, or None for NCCL's own.",
        )
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
            value = asked[name]
            setattr(pg_options.config, field, int(_CTA_POLICIES.get(value, value)))
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
