"""Every environment variable that is read: its name, type, default and meaning, declared once.

Nothing is read at import and nothing is kept: a variable is read at each call.
A value that does not parse is an error and never replaced by the default, and so is a variable
with the prefix that is not declared here, because a misspelt one would otherwise do nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from pcomm.core.errors import ConfigError, near_misses

__all__ = [
    "CACHE",
    "HOST",
    "LOCAL_RANKS",
    "LOG",
    "RANKS",
    "RANKS_TIMEOUT_S",
    "STORE",
    "TIMEOUT_S",
    "VARIABLES",
    "Variable",
    "cache",
    "check",
    "host_and_port",
    "local_rank",
    "log_level",
    "ranks_timeout_s",
    "read",
    "table",
    "timeout_s",
]

T = TypeVar("T")

_PREFIX: Final = "PCOMM_"
_LEVELS: Final = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable.

    Args:
        name: Full name, with the prefix.
        accepts: The values it takes, in words; part of the error and of the page.
        default: Value of the variable when it is not set.
        parse: Function from text to value, which raises `ValueError` for what it does not take.
        meaning: Effect of the variable, in one sentence.
    """

    name: str
    accepts: str
    default: T
    parse: Callable[[str], T]
    meaning: str


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(text)
    return value


def _place(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def host_and_port(text: str) -> tuple[str, int]:
    """The two parts of `HOST:PORT`, where an address of IPv6 is in brackets.

    Raises:
        ValueError: It is none.
    """
    host, _, port = text.rpartition(":")
    inside = host[1:-1] if host.startswith("[") and host.endswith("]") else ""
    if not (inside or (host and ":" not in host)) or not (port.isascii() and port.isdecimal()):
        raise ValueError(text)
    if not 0 < int(port) < 1 << 16:
        raise ValueError(text)
    return inside or host, int(port)


def _level(text: str) -> str:
    if text not in _LEVELS:
        raise ValueError(text)
    return text


def _name(text: str) -> str:
    if len(text.split()) != 1:
        raise ValueError(text)
    return text.strip()


def _folder(text: str) -> str:
    if text not in ("auto", "none") and not os.path.isabs(text):
        raise ValueError(text)
    return text


CACHE: Final = Variable(
    name="PCOMM_CACHE",
    accepts="a folder by its absolute path, `auto` or `none`",
    default="auto",
    parse=_folder,
    meaning="Where tokens of texts are kept for other runs, if `data.cache` does not say it: "
    "`auto` is `$XDG_CACHE_HOME/pcomm` or `~/.cache/pcomm`, `none` keeps none.",
)
HOST: Final = Variable[str | None](
    name="PCOMM_HOST",
    accepts="a name without spaces",
    default=None,
    parse=_name,
    meaning="The machine that this process is lost with, where its hostname is not that: the node "
    "of a Kubernetes pod. Copies of optimizer state go to different ones.",
)
LOG: Final = Variable(
    name="PCOMM_LOG",
    accepts="one of " + ", ".join(f"`{level}`" for level in _LEVELS),
    default="info",
    parse=_level,
    meaning="What the `pcomm` command logs to stderr: messages of this level and above.",
)
TIMEOUT_S: Final = Variable(
    name="PCOMM_TIMEOUT_S",
    accepts="a number of seconds above 0",
    default=60.0,
    parse=_seconds,
    meaning="How long a rank waits for the others when they compare plans or report errors.",
)
RANKS_TIMEOUT_S: Final = Variable(
    name="PCOMM_RANKS_TIMEOUT_S",
    accepts="a number of seconds above 0",
    default=60.0,
    parse=_seconds,
    meaning="Time limit of one test that runs on local ranks, on a machine that is not busy "
    "otherwise; then every rank's stack is shown.",
)
RANKS: Final = Variable[int | None](
    name="PCOMM_RANKS",
    accepts="a whole number from 1",
    default=None,
    parse=_count,
    meaning="How many ranks a job has whose launcher does not say it: an indexed Kubernetes Job.",
)
STORE: Final = Variable[tuple[str, int] | None](
    name="PCOMM_STORE",
    accepts="`HOST:PORT`, an address of IPv6 in brackets",
    default=None,
    parse=host_and_port,
    meaning="The store of a resilient run, as `pcomm store` tells its address; `--store` counts "
    "before it.",
)
VARIABLES: Final[tuple[Variable[Any], ...]] = (
    CACHE,
    HOST,
    LOG,
    RANKS,
    STORE,
    TIMEOUT_S,
    RANKS_TIMEOUT_S,
)


def _local_rank_of(launcher: str, name: str) -> Variable[int | None]:
    return Variable(
        name=name,
        accepts="a whole number from 0",
        default=None,
        parse=_place,
        meaning=f"The place of a process among those of its machine, as {launcher} sets it.",
    )


# Set by launchers, which may start one another: the inner one, which started this process, first.
LOCAL_RANKS: Final[tuple[Variable[int | None], ...]] = (
    _local_rank_of("torchrun", "LOCAL_RANK"),
    _local_rank_of("Open MPI", "OMPI_COMM_WORLD_LOCAL_RANK"),
    _local_rank_of("MPICH or Intel MPI", "MPI_LOCALRANKID"),
    _local_rank_of("Slurm", "SLURM_LOCALID"),
)


def read(variable: Variable[T], environ: Mapping[str, str] | None = None) -> T:
    """The value of `variable` now, or its default where it is not set.

    Args:
        variable: One of the variables of this module.
        environ: Mapping to read from; `os.environ` if absent.

    Raises:
        ConfigError: It is set to something that it does not take; an empty value counts as set.
    """
    text = (os.environ if environ is None else environ).get(variable.name)
    if text is None:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError:
        raise ConfigError(
            f"environment variable {variable.name}",
            found=f"the value {text!r}",
            why=f"It takes {variable.accepts}.",
            fix="Set it to such a value, or unset it"
            + (
                "."
                if variable.default is None
                else f" for the default, {_shown(variable.default)}."
            ),
        ) from None


def check(environ: Mapping[str, str] | None = None) -> None:
    """Refuse an environment with a `PCOMM_*` variable that is unknown or does not parse.

    Args:
        environ: Mapping to read from; `os.environ` if absent.

    Raises:
        ConfigError: The first such variable; for an unknown one with the nearest names.
    """
    present = os.environ if environ is None else environ
    known = [variable.name for variable in VARIABLES]
    for name in sorted(present):
        if name.startswith(_PREFIX) and name not in known:
            raise ConfigError(
                f"environment variable {name}",
                found=f"it is set to {present[name]!r}",
                why=f"No variable of that name is read, and the prefix {_PREFIX} is reserved.",
                fix=f"{near_misses(name, known)} Otherwise unset it.",
            )
    for variable in VARIABLES:
        read(variable, present)


def cache(environ: Mapping[str, str] | None = None) -> str:
    """`PCOMM_CACHE`."""
    return read(CACHE, environ)


def log_level(environ: Mapping[str, str] | None = None) -> str:
    """`PCOMM_LOG`."""
    return read(LOG, environ)


def timeout_s(environ: Mapping[str, str] | None = None) -> float:
    """`PCOMM_TIMEOUT_S`, in seconds."""
    return read(TIMEOUT_S, environ)


def ranks_timeout_s(environ: Mapping[str, str] | None = None) -> float:
    """`PCOMM_RANKS_TIMEOUT_S`, in seconds."""
    return read(RANKS_TIMEOUT_S, environ)


def local_rank(environ: Mapping[str, str] | None = None) -> int | None:
    """The place of this process among those of its machine; None if no launcher has told it."""
    return next((n for v in LOCAL_RANKS if (n := read(v, environ)) is not None), None)


def table() -> str:
    """All `PCOMM_*` variables as a Markdown table, for the page of the documentation."""
    rows = [
        f"| `{v.name}` | {v.accepts} | `{_shown(v.default)}` | {v.meaning} |" for v in VARIABLES
    ]
    head = ["| variable | takes | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def _shown(default: object) -> str:
    if default is None:
        return "unset"
    return f"{default:g}" if isinstance(default, float) else str(default)
