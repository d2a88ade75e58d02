"""`pcomm chat`: a conversation with a model, at a terminal or through a pipe."""

from __future__ import annotations

import argparse
import io
import sys
from typing import TYPE_CHECKING

from pcomm.core.errors import PcommError
from pcomm.integration.commands.llm_options import (
    add_llm_options,
    given_options,
    llm_options,
    print_summary,
)

if TYPE_CHECKING:
    from pcomm.inference import SamplingParams
    from pcomm.integration.llm import LLM

__all__ = ["command"]

_NEW = "/new"


class ChatCommand:
    """Answers each line of the standard input, with what was said before in mind."""

    name = "chat"
    help = (
        "Talk with a model: a line is a message, its answer is written as it comes; "
        f"the line {_NEW} begins another conversation."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """`DIR`, how tokens are drawn, and how the model is loaded."""
        add_llm_options(parser)
        parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
        parser.add_argument("--max-tokens", type=int, metavar="N", help="default: 512")
        parser.add_argument("--temperature", type=float, metavar="T", help="default: 0.8")
        parser.add_argument("--top-p", type=float, metavar="P", help="default: 1")
        parser.add_argument("--seed", type=int, default=0, metavar="S")

    def run(self, arguments: argparse.Namespace) -> int:
        """Read, answer, and so on until the end of the input; then say how fast that was.

        A message that cannot be answered is said and left out, and the next line is read. The line
        `/new` forgets what was said, but for `--system`: a conversation that has outgrown the
        model can go on in no other way.

        Returns:
            0; 2 if the input is no terminal and a message of it was left out.
        """
        # Imported late, so that --help does not wait for torch.
        from pcomm.inference import SamplingParams
        from pcomm.integration.llm import LLM

        given = given_options(arguments, "max_tokens", "temperature", "top_p", "seed")
        # A value that is wrong is said before the model is loaded.
        SamplingParams(**given)
        messages: list[dict[str, object]] = []
        if arguments.system:
            messages.append({"role": "system", "content": arguments.system})
        if isinstance(sys.stdin, io.TextIOWrapper):
            # Bytes that are no UTF-8 arrive as lone surrogates, and cost one message, not all.
            sys.stdin.reconfigure(errors="surrogateescape")
        num_left_out = 0
        with LLM(**llm_options(arguments), max_requests=1) as llm:
            params = llm.defaults.params(given, {"max_tokens": 512, "temperature": 0.8})
            while (line := _line()) is not None:
                if line.strip() == _NEW:
                    messages = _without_turns(messages)
                elif line.strip() and not _answer(llm, messages, line, params):
                    num_left_out += 1
            print_summary(llm)
        return 2 if num_left_out and not sys.stdin.isatty() else 0


def _line() -> str | None:
    """The next line without its end; None at the end of the input."""
    if sys.stdin.isatty():
        try:
            return input("> ")
        except EOFError:
            print()
            return None
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _answer(llm: LLM, messages: list[dict[str, object]], line: str, params: SamplingParams) -> bool:
    """Write the answer, and add both to the conversation; a Ctrl-C at a terminal cuts it.

    False if there is none: then the reason was written, and the conversation is as it was.
    """
    question: dict[str, object] = {"role": "user", "content": line}
    written = ""
    try:
        prompt, settings = llm.chat_prompt([*messages, question], params)
        most = llm.max_model_len
        if len(prompt) >= most and _fits_alone(llm, messages, question, params):
            _say_full(f"has {len(prompt)} tokens with this message, and the model reads {most - 1}")
            return False
        reason, length = None, len(prompt)
        for delta in llm.stream(prompt, settings):
            written += delta.text
            reason, length = delta.finish_reason, length + len(delta.token_ids)
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    except PcommError as error:
        if written:
            print()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        print("This message is left out; the next may be another one.", file=sys.stderr)
        return False
    print()
    if reason == "length" and length >= most:
        _say_full(f"has {length} tokens, the most of this model, and the answer is cut off")
    messages += [question, {"role": "assistant", "content": written}]
    return True


def _without_turns(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    return [message for message in messages if message["role"] == "system"]


def _fits_alone(
    llm: LLM, messages: list[dict[str, object]], question: dict[str, object], params: SamplingParams
) -> bool:
    alone = [*_without_turns(messages), question]
    return len(llm.chat_prompt(alone, params)[0]) < llm.max_model_len


def _say_full(found: str) -> None:
    print(f"The conversation {found}.", file=sys.stderr)
    print(f"Type {_NEW} to begin another one; what was said is then forgotten.", file=sys.stderr)


command = ChatCommand()
