"""`pcomm generate`: text from a trained run, or from a Hugging Face directory."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from pcomm.core.errors import ConfigError
from pcomm.integration.commands.llm_options import (
    OR_DEFAULT,
    RunSummary,
    add_drawing_options,
    add_llm_options,
    given_options,
    llm_options,
)
from pcomm.integration.huggingface.directory import check_model_folder

if TYPE_CHECKING:
    from pcomm.inference import SamplingParams
    from pcomm.integration.llm import LLM

__all__ = ["command"]


class GenerateCommand:
    """Continues a prompt with the newest weights of a run, or those of a directory."""

    name = "generate"
    help = "Write text with the newest weights of a run, or a Hugging Face model."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """`DIR`, how it is loaded, the prompt, how tokens are drawn, the end, and `--json`."""
        add_llm_options(parser)
        prompt = parser.add_mutually_exclusive_group()
        prompt.add_argument(
            "--prompt",
            default="",
            metavar="TEXT",
            help="what to continue; default: no text, a new document",
        )
        prompt.add_argument(
            "--prompt-ids",
            metavar="1,2,3",
            help="what to continue, as ids of tokens; default: none",
        )
        add_drawing_options(parser, most_tokens=128)
        parser.add_argument(
            "--top-k", type=int, metavar="K", help=f"draw from the K likeliest; {OR_DEFAULT}0, all"
        )
        parser.add_argument(
            "--stop",
            action="append",
            metavar="TEXT",
            help="end before this text; may be given several times; default: none",
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the prompt and what follows it, while it is written, and how fast that was."""
        _check("--max-tokens", arguments.max_tokens, minimum=1)
        _check("--temperature", arguments.temperature, minimum=0)
        _check("--top-k", arguments.top_k, minimum=0)
        _check("--ranks", arguments.ranks, minimum=1)
        # As SamplingParams has it.
        _check("--seed", arguments.seed, minimum=-(2**63), below=2**64)
        if arguments.top_p is not None and not 0 < arguments.top_p <= 1:
            raise ConfigError(
                f"pcomm generate --top-p {arguments.top_p}",
                found=f"{arguments.top_p}",
                why="It is a probability, and without any there is no token to draw.",
                fix="Give a number above 0 and up to 1.",
            )
        _check_text("--prompt", arguments.prompt)
        for text in arguments.stop or ():
            _check_text("--stop", text)
        prompt: str | list[int] = arguments.prompt
        if arguments.prompt_ids is not None:
            prompt = _ids(arguments.prompt_ids)
        check_model_folder(arguments.model)
        # Imported late, so that a mistake above does not wait for torch.
        from pcomm.core import Topology, connect, open_groups
        from pcomm.integration.llm import LLM
        from pcomm.integration.llm.foreign_model import load_text_for_engine
        from pcomm.integration.llm.generation_defaults import generation_defaults

        given = given_options(
            arguments, "temperature", "top_k", "top_p", "seed", "max_tokens", "stop"
        )
        # Before the weights: memory is taken for this one text.
        loaded = load_text_for_engine(arguments.model, ranks=arguments.ranks)
        options = llm_options(arguments)
        defaults = generation_defaults(arguments.generation_config, loaded.generation)
        params = defaults.params(given, {"temperature": 0.8})
        ids = loaded.prompt_ids(prompt) if isinstance(prompt, str) else prompt
        most = arguments.max_model_len or loaded.max_tokens
        if len(ids) >= most:
            raise ConfigError(
                "prompt",
                found=f"{len(ids)} tokens, and a context of {most}",
                why="The model was not made for texts that are longer.",
                fix="Shorten the prompt; --max-model-len N reads more at your risk.",
            )
        options["max_model_len"] = min(most, len(ids) + params.max_tokens)
        with connect() as world, open_groups(Topology({"tp": world.size}), ["tp"]) as groups:
            # The ranks of a launcher such as torchrun share the model, and all write the text.
            group = groups["tp"] if world.size > 1 else None
            with LLM(**options, group=group, max_requests=1, prefix_cache=False) as llm:
                begun, is_first = time.perf_counter(), world.rank == 0
                shown = prompt if isinstance(prompt, str) else loaded.tokenizer.decode(prompt)
                text = _write(llm, shown, ids, params, shows=is_first and not arguments.json)
                seconds = time.perf_counter() - begun
                # On every rank, since they share the memory that is measured.
                summary = RunSummary(text["num_tokens"], seconds, llm.stats())
        if is_first and arguments.json:
            print(json.dumps(text | {"speed": summary.fields()}))
        elif is_first:
            print(summary.with_stats() if arguments.stats else summary, file=sys.stderr)
        return 0


def _write(
    llm: LLM, prompt: str, ids: Sequence[int], params: SamplingParams, *, shows: bool
) -> dict[str, Any]:
    """Continue the prompt, printed while it is written if `shows`; returns the fields of JSON."""
    text, tokens, reason = "", list[int](), None
    parts = llm.stream(ids, params)
    # What is wrong with the prompt is said before a part of it is shown.
    first = next(parts)
    if shows:
        print(prompt, end="")
    for part in chain((first,), parts):
        text, reason = text + part.text, part.finish_reason
        tokens += part.token_ids
        if shows:
            print(part.text, end="", flush=True)
    if shows:
        print()
    return {
        "prompt": prompt,
        "text": text,
        "num_tokens": len(tokens),
        "finish_reason": reason,
        "token_ids": tokens,
    }


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


def _check(option: str, value: float | None, *, minimum: int, below: float = float("inf")) -> None:
    # Written so that NaN, which compares as false, is refused.
    if value is not None and not minimum <= value < below:
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
