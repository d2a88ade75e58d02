"""Options of the commands that load a model into an `LLM`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

__all__ = ["add_llm_options", "add_placement_options", "llm_options"]


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
    }
