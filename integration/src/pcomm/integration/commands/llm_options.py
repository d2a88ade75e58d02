"""Options of commands that load an `LLM`, and the line on speed they end with."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pcomm.core.errors import PcommError

if TYPE_CHECKING:
    from pcomm.inference.engine import EngineStats
    from pcomm.integration.llm.llm import LLM

__all__ = ["RunSummary", "add_llm_options", "given_options", "llm_options", "print_summary"]


def add_llm_options(parser: argparse.ArgumentParser) -> None:
    """`DIR`, and how the model is loaded; for `llm_options`."""
    parser.add_argument(
        "model", type=Path, metavar="DIR", help="a run of `pcomm train`, or a Hugging Face folder"
    )
    add_placement_options(parser)
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="most tokens of a prompt and its text together",
    )
    parser.add_argument(
        "--memory-mib",
        type=int,
        metavar="N",
        help="memory for keys, values and states of all requests",
    )
    parser.add_argument(
        "--speculative-tokens",
        type=int,
        default=0,
        metavar="N",
        help="tokens that a step guesses from the text so far",
    )
    parser.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="auto: settings that are not given are those of the model's generation_config.json",
    )


def add_placement_options(parser: argparse.ArgumentParser) -> None:
    """`--dtype`, `--device`, `--ranks` and others: how weights are kept, and where."""
    parser.add_argument(
        "--dtype",
        default="auto",
        metavar="NAME",
        help="float32, bfloat16, float16; auto: that of the folder, fp32 for a run",
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="such as cpu or cuda:0")
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="share each layer among N processes of this machine",
    )
    parser.add_argument(
        "--quantization",
        metavar="NAME",
        help="int8: linear layers in half the bytes, for one to four texts at once on a CPU",
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="the same bits for a text whatever else is computed; slower, on a CPU",
    )


def llm_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `LLM` from what `add_llm_options` has read. Local."""
    memory = arguments.memory_mib
    return {
        "path": arguments.model,
        "ranks": arguments.ranks,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "quantization": arguments.quantization,
        "max_model_len": arguments.max_model_len,
        "memory_bytes": None if memory is None else memory * 2**20,
        "speculative_tokens": arguments.speculative_tokens,
        "batch_invariant": arguments.batch_invariant,
        "generation_config": arguments.generation_config,
    }


def given_options(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The options among `names` that were given, by their names; the model may have others. Local.

    Args:
        arguments: What was read; an option that was not given is None.
        names: Names of fields of `SamplingParams`.
    """
    return {name: found for name in names if (found := getattr(arguments, name)) is not None}


@dataclass(frozen=True)
class RunSummary:
    """The tokens of a run, the time for them, and how near it was to the limit of the memory.

    Args:
        num_tokens: Number of tokens that were written.
        seconds: Seconds that this took, prompts included; None where a text is one of many.
        stats: State of the engine that wrote them, afterwards.
    """

    num_tokens: int
    seconds: float | None
    stats: EngineStats

    def __str__(self) -> str:
        took = "" if self.seconds is None else f" in {self.seconds:.2f} s"
        parts = [f"{self.num_tokens} tokens{took}"]
        if self.stats.decode is not None:
            parts.append(str(self.stats.decode))
        if host := self.stats.host_us:
            parts.append("host: " + ", ".join(f"{name} {us:.0f} us" for name, us in host.items()))
        return "; ".join(parts)

    def fields(self) -> dict[str, object]:
        """The same for JSON: `seconds`, `decode` (null before a step of it) and `host_us`."""
        decode = self.stats.decode
        return {
            "seconds": self.seconds,
            "decode": None
            if decode is None
            else {
                **asdict(decode),
                "moved": {**asdict(decode.moved), "total": decode.moved.total},
                "floor_ms": decode.floor_ms,
                "ratio": decode.ratio,
            },
            "host_us": dict(self.stats.host_us),
        }


def print_summary(llm: LLM) -> None:
    """Write the line of all texts of `llm` to stderr. Local.

    Nothing is written without a text, or where the engine has failed and cannot be asked.

    Args:
        llm: A model that is not closed.
    """
    try:
        stats = llm.stats()
    except PcommError:
        return
    if stats.written_tokens:
        print(RunSummary(stats.written_tokens, None, stats), file=sys.stderr)
