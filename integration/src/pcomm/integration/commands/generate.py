"""`pcomm generate`: text from a trained run, or from a Hugging Face directory."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from pcomm.core.errors import ConfigError
from pcomm.integration.commands.llm_options import add_placement_options

if TYPE_CHECKING:
    from pcomm.inference import SamplingParams
    from pcomm.integration.generate.writer import Writer

__all__ = ["GenerateCommand", "command"]


class GenerateCommand:
    """Continues a prompt with the newest weights of a run, or those of a directory."""

    name = "generate"
    help = "Write text with the newest weights of a run, or a Hugging Face model."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """`DIR`, the prompt, how tokens are drawn, when the text ends, and `--json`."""
        parser.add_argument(
            "run", type=Path, metavar="DIR", help="a run of `pcomm train`, or a Hugging Face folder"
        )
        prompt = parser.add_mutually_exclusive_group()
        prompt.add_argument("--prompt", default="", metavar="TEXT", help="what to continue")
        prompt.add_argument(
            "--prompt-ids", metavar="1,2,3", help="what to continue, as ids of tokens"
        )
        parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
        parser.add_argument(
            "--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest token"
        )
        parser.add_argument(
            "--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest; 0: all"
        )
        parser.add_argument(
            "--top-p",
            type=float,
            default=1.0,
            metavar="P",
            help="draw from the likeliest tokens that together have this probability",
        )
        parser.add_argument(
            "--stop",
            action="append",
            default=[],
            metavar="TEXT",
            help="end before this text; may be given several times",
        )
        parser.add_argument("--seed", type=int, default=0, metavar="S")
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        add_placement_options(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the prompt and what follows it, while it is written, and how fast that was."""
        _check("--max-tokens", arguments.max_tokens, minimum=1)
        _check("--temperature", arguments.temperature, minimum=0)
        _check("--top-k", arguments.top_k, minimum=0)
        _check("--ranks", arguments.ranks, minimum=1)
        # As SamplingParams has it.
        _check("--seed", arguments.seed, minimum=-(2**63), below=2**64)
        if not 0 < arguments.top_p <= 1:
            raise ConfigError(
                f"pcomm generate --top-p {arguments.top_p}",
                found=f"{arguments.top_p}",
                why="It is a probability, and without any there is no token to draw.",
                fix="Give a number above 0 and up to 1.",
            )
        _check_text("--prompt", arguments.prompt)
        for text in arguments.stop:
            _check_text("--stop", text)
        prompt: str | list[int] = arguments.prompt
        if arguments.prompt_ids is not None:
            prompt = _ids(arguments.prompt_ids)
        words = (arguments, prompt)
        if arguments.ranks == 1:
            write_on_rank(*words)
            return 0
        # Imported late, so that a mistake above does not wait for torch.
        from pcomm.core import run_local
        from pcomm.core.process import RankError
        from pcomm.integration.llm.loading import load_text

        # Before any rank is started.
        load_text(arguments.run, ranks=arguments.ranks)
        try:
            run_local(
                write_on_rank,
                arguments.ranks,
                words,
                threads=max(1, (os.cpu_count() or 1) // arguments.ranks),
                preload=("pcomm.integration.generate.writer",),
            )
        except RankError as error:
            print(error, file=sys.stderr)
            return 1
        return 0


def write_on_rank(arguments: argparse.Namespace, prompt: str | list[int]) -> None:
    """One rank of `pcomm generate`; the first one prints. Collective over all ranks."""
    from pcomm.core import Topology, connect, open_groups
    from pcomm.inference import SamplingParams
    from pcomm.integration.generate.writer import Writer
    from pcomm.integration.llm.devices import device_of
    from pcomm.integration.llm.dtypes import dtype_of
    from pcomm.integration.llm.run_summary import RunSummary

    params = SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        stop=tuple(arguments.stop),
    )
    with connect() as world, open_groups(Topology({"tp": world.size}), ["tp"]) as groups:
        group = groups["tp"] if world.size > 1 else None
        writer = Writer.load(
            arguments.run,
            dtype=dtype_of(arguments.dtype),
            device=device_of(arguments.device),
            group=group,
            quantization=arguments.quantization,
            batch_invariant=arguments.batch_invariant,
        )
        begun = time.perf_counter()
        if world.rank or arguments.json:
            text = dataclasses.asdict(writer.write(prompt, params))
            num_tokens = text["num_tokens"]
        else:
            num_tokens = _show(writer, prompt, params)
        seconds = time.perf_counter() - begun
        # On every rank, since they share the memory that is measured.
        stats = writer.stats()
        assert stats is not None, "a text was written"
        summary = RunSummary(num_tokens, seconds, stats)
        if world.rank:
            return
        if arguments.json:
            print(json.dumps(text | {"speed": summary.fields()}))
        else:
            print(summary, file=sys.stderr)


def _show(writer: Writer, prompt: str | list[int], params: SamplingParams) -> int:
    """Print the text while it is written, and return the number of its tokens."""
    num_tokens, parts = 0, writer.stream(prompt, params)
    # What is wrong with the prompt is said before a part of it is shown.
    first = next(parts)
    print(writer.text_of(prompt), end="")
    for part in chain((first,), parts):
        print(part.text, end="", flush=True)
        num_tokens += len(part.token_ids)
    print()
    return num_tokens


def _ids(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 0:
        raise ConfigError(
            f"pcomm generate --prompt-ids {text}",
            found=f"{text!r}",
            why="It is a list of whole numbers from 0, with commas between them.",
            fix="Write for example `--prompt-ids 1,2,3`.",
        )
    return found


def _check(option: str, value: float, *, minimum: int, below: float = float("inf")) -> None:
    # Written so that NaN, which compares as false, is refused.
    if not minimum <= value < below:
        limits = f"at least {minimum}" + (f" and below {below}" if below < float("inf") else "")
        raise ConfigError(
            f"pcomm generate {option} {value}",
            found=f"{value}",
            why=f"It is a number of {limits}.",
            fix=f"Give a number of {limits}.",
        )


def _check_text(option: str, text: str) -> None:
    # Bytes of the command line that are no UTF-8 arrive as lone surrogates.
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(
            f"pcomm generate {option}",
            found=f"{text!r}, which is not valid Unicode",
            why="The tokenizer reads text, and this is bytes that are no UTF-8.",
            fix="Give it as UTF-8.",
        )


command = GenerateCommand()
