"""One rank of an engine on several: loads its part of the model, and makes the calls that come."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from pcomm.core import Group, Topology, connect, open_groups
from pcomm.core.collectives import Collectives
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.process import Messages, portable_error
from pcomm.inference import Engine, RequestOutput
from pcomm.inference.engine import EngineStats
from pcomm.integration.llm.engine_size import EngineOptions, free_bytes
from pcomm.integration.llm.loading import load_model

__all__ = ["GROUP", "MEET", "installed_collectives", "serve_engine"]

MEET = "meet"
"""The message after a step that failed: the ranks enter one collective, and say what it gave."""


@dataclass(frozen=True)
class RankReply:
    """What one rank says to a call.

    Attributes:
        value: Result of the call, on the first rank; None on the others.
        digest: Number that is equal on all ranks if they did the same.
        has_work: `Engine.has_work` after the call.
        has_raised: True if the call has raised the error of the answer, and not survived it.
    """

    value: Any
    digest: int
    has_work: bool
    has_raised: bool = False


def serve_engine(
    messages: Messages,
    path: Path,
    dtype: torch.dtype | None,
    quantization: str | None,
    device: torch.device,
    options: EngineOptions,
) -> None:
    """Load this rank's part of a model, and make the calls that come. Collective over all ranks.

    The first answer is the number of bytes that are free for requests, the first message how many
    of them to take. Each message after that is the name of a method of `Engine` with its arguments.

    Args:
        messages: Messages of the process that has started the ranks.
        path: Folder of the model.
        dtype: Dtype of the weights; None for that of the folder.
        quantization: Form of the weights as for `load_model`.
        device: Device of the model; without a number each rank takes that of its own.
        options: Options of the engine.
    """
    with connect(device="cpu") as world:
        backend = "gloo"
        if device.type == "cuda":
            device, backend = torch.device("cuda", world.rank), "nccl"
            torch.cuda.set_device(device)
        topology, collectives = Topology({"tp": world.size}), installed_collectives(device)
        with open_groups(topology, ["tp"], backend=backend, collectives=collectives) as groups:
            group = groups["tp"]
            loaded = load_model(
                path,
                dtype=dtype,
                device=device,
                group=group,
                quantization=quantization,
                batch_invariant=options.batch_invariant,
                most_rows=options.max_requests * (1 + options.speculative_tokens),
            )
            messages.answer(free_bytes(device))
            for budget_bytes in messages:
                engine = options.engine(loaded, budget_bytes, group)
                messages.answer(None)
                _answer_calls(messages, engine, group, device)
                engine.close()


def _answer_calls(messages: Messages, engine: Engine, group: Group, device: torch.device) -> None:
    num_met = 0
    for method, arguments in messages:
        error: Exception | None = None
        value, has_raised = None, False
        try:
            if method == MEET:
                num_met += 1
                value = _meet(group, device, num_met)
            else:
                value = getattr(engine, method)(*arguments)
        except Exception as raised:
            error, has_raised = raised, True
        if method == "step":
            error = error or engine.step_error
        has_work = engine.has_work
        digest = _digest((type(error).__name__ if has_raised else _common(value), has_work))
        carried = _carried(value) if group.rank == 0 else None
        reply = RankReply(carried, digest, has_work, has_raised)
        messages.answer(reply, error)


def _meet(group: Group, device: torch.device, number: int) -> list[int]:
    """One collective of all ranks: it gives what is expected if none was left in between."""
    mine = torch.tensor([number * group.size + group.rank], device=device)
    found: list[int] = group.collectives.all_gather(mine).tolist()
    return [one - number * group.size for one in found]


def _common(value: object) -> object:
    """What all ranks must have in common of a result."""
    if isinstance(value, EngineStats):
        pools = (value.blocks, value.state_slots)
        return value.running, value.waiting, value.steps, value.computed_tokens, pools
    if isinstance(value, list):
        return [
            (one.request_id, one.token_ids, one.text, one.finish_reason, type(one.error).__name__)
            if isinstance(one, RequestOutput)
            else one
            for one in value
        ]
    return value


def _carried(value: Any) -> Any:
    """A result whose exceptions can be loaded by another process."""
    if isinstance(value, Sequence):
        for one in value:
            if isinstance(one, RequestOutput) and one.error is not None:
                error = portable_error(one.error)
                assert isinstance(error, Exception)
                one.error = error
    return value


def _digest(value: object) -> int:
    return zlib.crc32(repr(value).encode(errors="backslashreplace"))


GROUP = "pcomm.collectives"
"""Entry points: each names a function without arguments that returns what `open_groups` takes."""


def installed_collectives(device: torch.device) -> Callable[[Group], Collectives] | None:
    """The argument `collectives` of `open_groups`, for an engine whose tensors are on `device`.

    Local; equal on ranks with the same packages. None where no package brings any. They are made
    for GPUs, so on a CPU nothing is looked for or imported, unless Triton's interpreter is turned
    on. The package itself decides whether the ranks of a group can use them, or keep theirs.

    Args:
        device: Device of the model.

    Raises:
        ConfigError: Several packages bring some.
        UnsupportedError: The package cannot be imported.
    """
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    # One distribution is found twice where its source folder is on the path as well.
    entries = {entry.value: entry for entry in entry_points(group=GROUP)}
    if len(entries) > 1:
        raise ConfigError(
            "collectives of an engine on several ranks",
            found=f"{', '.join(sorted(entry.name for entry in entries.values()))} are installed",
            why="The operations of a group have one implementation.",
            fix="Uninstall all but one.",
        )
    for value, entry in entries.items():
        try:
            make: Callable[[Group], Collectives] = entry.load()()
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(
                f"collectives {entry.name!r} of an engine on several ranks",
                found=f"{type(error).__name__}: {error}",
                why=f"An installed package brings them as {value}, which cannot be loaded.",
                fix="Install that package again with what it needs, or uninstall it.",
            ) from error
        return make
    return None
