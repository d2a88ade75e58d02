"""One rank of an `LLM` on several: its part of the model, and an engine that is told what to do."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pcomm.core import Group, Topology, connect, open_groups
from pcomm.core.process import Messages, portable_error
from pcomm.inference import Engine, RequestOutput
from pcomm.inference.engine import EngineStats
from pcomm.integration.llm.engine_options import EngineOptions
from pcomm.integration.llm.installed_collectives import installed_collectives
from pcomm.integration.llm.loading import load_model
from pcomm.integration.llm.memory_size import free_bytes

__all__ = ["MEET", "Reply", "serve_engine"]

MEET = "meet"
"""The message after a step that failed: the ranks enter one collective, and say what it gave."""


@dataclass(frozen=True)
class Reply:
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
        reply = Reply(carried, digest, has_work, has_raised)
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
