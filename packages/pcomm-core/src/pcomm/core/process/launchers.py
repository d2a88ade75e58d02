"""Which rank a process is, and on which host, as its launcher says in the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from pcomm.core import environment
from pcomm.core.errors import ConfigError

__all__ = ["launched_place", "this_host"]


@dataclass(frozen=True)
class _Launcher:
    """The variables in which a launcher tells a process its rank, and the number of ranks.

    Args:
        name: The launcher in words.
        rank: Variable with the rank.
        size: Variable with the number of ranks; None for a launcher that does not tell it.
    """

    name: str
    rank: str
    size: str | None


# Ray Train and Kubeflow set the variables of torchrun, and so do scripts.
_TORCHRUN = _Launcher("torchrun", "RANK", "WORLD_SIZE")
_LAUNCHERS = (
    _TORCHRUN,
    _Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
    _Launcher("an indexed Kubernetes Job", "JOB_COMPLETION_INDEX", None),
)
# Only a process that torchrun has started has it, whatever has started torchrun.
_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"


def launched_place(
    rank: int | None, size: int | None, environ: Mapping[str, str] | None = None
) -> tuple[int, int]:
    """The rank of this process, and the number of ranks. Local; see `RankPlace.from_environment`.

    Args:
        rank: The rank, where the user has given it; then launchers are not asked for it.
        size: The number of ranks, where the user has given it; by default `PCOMM_RANKS`.
        environ: Variables to read; `os.environ` if absent.

    Raises:
        ConfigError: Nothing tells the rank or the number, several launchers contradict each other,
            or the rank is none of a job of this size.
    """
    variables = os.environ if environ is None else environ
    sizes: dict[str, int] = {}
    if size is not None:
        sizes["--ranks"] = size
    elif (told := environment.read(environment.RANKS, variables)) is not None:
        sizes[environment.RANKS.name] = told
    ranks: dict[str, int] = {} if rank is None else {"--rank": rank}
    if not (ranks and sizes):
        found = [one for one in _LAUNCHERS if one.rank in variables]
        if _OF_TORCHRUN in variables and _TORCHRUN in found:
            found = [_TORCHRUN]
        if rank is None:
            ranks = {one.rank: _number(variables, one.rank) for one in found}
        for one in found:
            if one.size is not None and one.size in variables:
                sizes[one.size] = _number(variables, one.size)
    _check_told(ranks, sizes)
    return next(iter(ranks.values())), next(iter(sizes.values()))


# Slurm's own name of the node, whatever hostname a container has.
_NODE_OF_SLURM = "SLURMD_NODENAME"


def this_host(environ: Mapping[str, str] | None = None) -> str:
    """Name of the machine that this process is lost with. Local.

    `PCOMM_HOST`, or what Slurm tells in `SLURMD_NODENAME`, or the hostname.

    Args:
        environ: Variables to read; `os.environ` if absent.

    Raises:
        ConfigError: `PCOMM_HOST` is empty.
    """
    variables = os.environ if environ is None else environ
    own = environment.read(environment.HOST, variables)
    return own or variables.get(_NODE_OF_SLURM) or socket.gethostname()


def _number(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise ConfigError(
            f"the rank of this process: {name}={variables[name]!r}",
            found="text that is no whole number",
            why="A launcher numbers its processes in it.",
            fix=f"Unset {name}, or give --rank R --ranks N, which are read in its place.",
        ) from None


def _check_told(ranks: Mapping[str, int], sizes: Mapping[str, int]) -> None:
    """Refuse what does not tell one rank of one job."""
    names = ", ".join(f"{one.rank} ({one.name})" for one in _LAUNCHERS)
    told = ", ".join(f"{name} {value}" for name, value in {**ranks, **sizes}.items())
    if not ranks:
        found = f"none of {names}"
        why = "Each process of a job is one rank, and its launcher tells which."
        fix = "Start it with one of these launchers, or give --rank R --ranks N."
    elif not sizes:
        found = f"{told}, and no number of ranks"
        why = "A rank waits for the others, so it must know how many there are."
        fix = "Give --ranks N, or set PCOMM_RANKS: `completions` of a Kubernetes Job."
    elif len(set(ranks.values())) > 1 or len(set(sizes.values())) > 1:
        found = f"{told}, which contradict each other"
        why = "Where one launcher has started another, each numbers processes of its own."
        fix = "Give --rank R --ranks N, or unset the variables of the launcher that does not count."
    elif not 0 <= next(iter(ranks.values())) < next(iter(sizes.values())):
        found = told
        why = "Ranks are numbered from 0 to one less than their number."
        fix = "Give each process a rank of its own in that range, and all the same number of ranks."
    else:
        return
    raise ConfigError("the rank of this process", found=found, why=why, fix=fix)
