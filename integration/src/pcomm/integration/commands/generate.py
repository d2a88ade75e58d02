"""`pcomm generate`: text from a trained run."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from pcomm.core.errors import ConfigError

__all__ = ["GenerateCommand", "command"]


class GenerateCommand:
    """Continues a prompt with the newest weights of a run."""

    name = "generate"
    help = "Write text with the newest weights of a run."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """`DIR`, `--prompt`, `--max-tokens`, `--temperature`, `--seed`, `--json`."""
        parser.add_argument("run", type=Path, metavar="DIR", help="the folder of a `pcomm train`")
        parser.add_argument("--prompt", default="", metavar="TEXT", help="what to continue")
        parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
        parser.add_argument(
            "--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest token"
        )
        parser.add_argument("--seed", type=int, default=0, metavar="S")
        parser.add_argument("--json", action="store_true", help="print one JSON object")

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the prompt and what follows it."""
        _check("--max-tokens", arguments.max_tokens, minimum=1)
        _check("--temperature", arguments.temperature, minimum=0)
        _check("--seed", arguments.seed, minimum=0, below=2**63)
        _check_text(arguments.prompt)
        # Imported late, so that a mistake above does not wait for torch.
        from pcomm.integration.generate.writer import Writer

        text = Writer.load(arguments.run).write(
            arguments.prompt,
            max_tokens=arguments.max_tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
        )
        if arguments.json:
            print(json.dumps(dataclasses.asdict(text)))
        else:
            print(text.prompt + text.text)
        return 0


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


def _check_text(prompt: str) -> None:
    # Bytes of the command line that are no UTF-8 arrive as lone surrogates.
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise ConfigError(
            "pcomm generate --prompt",
            found=f"{prompt!r}, which is not valid Unicode",
            why="The tokenizer reads text, and this is bytes that are no UTF-8.",
            fix="Give the prompt as UTF-8.",
        )


command = GenerateCommand()
