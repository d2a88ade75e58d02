"""Options of commands that load an `LLM`, what was loaded, and the line that they end with."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pcomm.core.errors import PcommError
from pcomm.integration.huggingface.directory import check_model_folder

if TYPE_CHECKING:
    from pcomm.inference.engine import EngineStats
    from pcomm.integration.llm.llm import LLM

__all__ = [
    "OR_DEFAULT",
    "RunSummary",
    "add_drawing_options",
    "add_llm_options",
    "begin_loading",
    "given_options",
    "llm_options",
    "load_aloud",
    "print_summary",
]

# Where a model brings settings of its own, they come first.
OR_DEFAULT = "default: as generation_config.json of the model says, else "


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
        help="most tokens of a prompt and its text together; default: what the model was made for",
    )
    parser.add_argument(
        "--memory-mib",
        type=int,
        metavar="N",
        help="MiB for keys, values and states of all requests; default: a quarter of the free "
        "memory of the host, four fifths of that of a GPU",
    )
    parser.add_argument(
        "--speculative-tokens",
        type=int,
        default=0,
        metavar="N",
        help="tokens that a step guesses from the text so far",
    )
    parser.add_argument(
        "--stats",
        action="store_true",
        help="say at the end what a step took, and how near that is to the limit of the memory",
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
        help="float32, bfloat16, float16; auto: that of the folder, float32 for a run",
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
        help="int8: linear layers in half the bytes, for one to four texts at once on a CPU; "
        "default: none",
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="the same bits for a text whatever else is computed; slower, on a CPU",
    )


def add_drawing_options(parser: argparse.ArgumentParser, *, most_tokens: int) -> None:
    """`--max-tokens`, with `most_tokens` as its default, `--temperature`, `--top-p`, `--seed`."""
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"most tokens to write; {OR_DEFAULT}{most_tokens}",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help=f"0: always the likeliest token; {OR_DEFAULT}0.8",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help=f"draw from the likeliest tokens that together have this probability; {OR_DEFAULT}1",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the draws")


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
        arguments: Parsed options; one that was not given is None.
        names: Names of fields of `SamplingParams`.
    """
    return {name: found for name in names if (found := getattr(arguments, name)) is not None}


def begin_loading(arguments: argparse.Namespace) -> None:
    """Refuse a path without a model, and say on stderr what is loaded, before torch is. Local."""
    check_model_folder(arguments.model)
    print(f"loading {arguments.model} ...", file=sys.stderr, flush=True)


def load_aloud(arguments: argparse.Namespace, *, max_requests: int, max_queued: int = 256) -> LLM:
    """The `LLM` of the options; stderr gets what was loaded, and where. Local.

    Args:
        arguments: Parsed options of `add_llm_options`.
        max_requests: Most requests that run at once.
        max_queued: Most requests that wait.
    """
    # Imported late, so that --help does not wait for torch.
    from pcomm.integration.llm import LLM

    llm = LLM(**llm_options(arguments), max_requests=max_requests, max_queued=max_queued)
    try:
        print(_description(llm, arguments), file=sys.stderr, flush=True)
    except BaseException:
        llm.close()
        raise
    return llm


def _description(llm: LLM, arguments: argparse.Namespace) -> str:
    """What was loaded and where, for a person: two lines, and those that a model needs besides."""
    from pcomm.integration.checkpoint.folders import newest

    loaded, stats, ranks = llm.loaded, llm.stats(), arguments.ranks
    checkpoint = newest(arguments.model)
    step = "" if checkpoint is None else f", step {checkpoint.step}"
    dtype = str(llm.dtype).removeprefix("torch.")
    if arguments.quantization:
        dtype += f", linear layers in {arguments.quantization}"
    by = "" if llm.implementation == "pcomm" else f", run by {llm.implementation}"
    pools = stats.blocks, stats.state_slots
    sizes = [ranks * pool.size * pool.bytes_each for pool in pools]
    names = "keys, values and states" if all(sizes) else "states" if sizes[1] else "keys and values"
    lines = [
        f"{loaded.name}: {loaded.num_parameters:,} parameters in {dtype}{by}, from "
        f"{arguments.model}{step}",
        f"on {arguments.device}, {ranks} process{'es' if ranks > 1 else ''}; context of "
        f"{llm.max_model_len:,} tokens; {sum(sizes) / 2**20:,.1f} MiB for {names}",
    ]
    if llm.defaults.fields:
        lines.append(
            f"{llm.defaults} by its generation_config.json, where nothing else is asked for"
        )
    if loaded.chat_stop:
        lines.append(
            "This model has no chat template: it was made to continue a text, and answers like "
            f"one. `pcomm generate {arguments.model} --prompt TEXT` asks for that."
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class RunSummary:
    """The tokens of a run, the time for them, and how near it was to the limit of the memory.

    Args:
        num_tokens: Number of tokens that were written.
        seconds: Seconds that this took, prompts included; None where that says nothing, since
            several texts were written at once, or none for a while.
        stats: State of the engine that wrote them, afterwards.
    """

    num_tokens: int
    seconds: float | None
    stats: EngineStats

    def __str__(self) -> str:
        words = f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"
        return f"{words}, {self.num_tokens / self.seconds:.1f} tokens/s" if self.seconds else words

    def with_stats(self) -> str:
        """The same, and what a step took: the time of its phases, and that of the memory."""
        parts = [str(self)]
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


def print_summary(llm: LLM, arguments: argparse.Namespace, seconds: float | None = None) -> None:
    """Write the line of all texts of `llm` to stderr, with the engine's for `--stats`. Local.

    Nothing is written without a text, or where the engine has failed and cannot be asked.

    Args:
        llm: A model that is not closed.
        arguments: Parsed options of `add_llm_options`.
        seconds: Seconds for all texts, as `RunSummary` has it.
    """
    try:
        stats = llm.stats()
    except PcommError:
        return
    if stats.written_tokens:
        summary = RunSummary(stats.written_tokens, seconds, stats)
        print(summary.with_stats() if arguments.stats else summary, file=sys.stderr)
