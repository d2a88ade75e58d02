"""`pcomm chat`: a conversation with a model, at a terminal or through a pipe."""

from __future__ import annotations

import argparse
import io
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pcomm.core.errors import PcommError
from pcomm.integration.commands.llm_options import (
    add_drawing_options,
    add_llm_options,
    begin_loading,
    given_options,
    load_aloud,
    print_summary,
)

if TYPE_CHECKING:
    from pcomm.inference import SamplingParams
    from pcomm.integration.llm import LLM

__all__ = ["command"]

_WORDS = {
    "/new": "begin another conversation, and forget this one",
    "/help": "list these words",
    "/exit": "leave, as /quit, /bye and Ctrl-D do",
}
_LEAVE = ("/exit", "/quit", "/bye")


class ChatCommand:
    """Answers each line of the standard input, with what was said before in mind."""

    name = "chat"
    help = (
        "Talk with a model: a line is a message, and its answer is written as it comes. The line "
        "/new begins another conversation; /exit, or the end of the input, leaves."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """`DIR`, how tokens are drawn, and how the model is loaded."""
        add_llm_options(parser)
        parser.add_argument(
            "--system", metavar="TEXT", help="what the model is told first; default: nothing"
        )
        add_drawing_options(parser, most_tokens=512)

    def run(self, arguments: argparse.Namespace) -> int:
        """Read, answer, and so on until the end of the input; then say how fast that was.

        A message that cannot be answered is said and left out, and the next line is read. So is a
        line that begins with an unknown `/word`. The line `/new` forgets what was said, but for
        `--system`: a conversation that has outgrown the model can go on in no other way.

        Returns:
            0; 2 if the input is no terminal and a message of it was left out.

        Raises:
            PeerError: A rank has died, so that no message can be answered any more.
        """
        begin_loading(arguments)
        # Imported late, so that --help does not wait for torch.
        from pcomm.inference import SamplingParams

        given = given_options(arguments, "max_tokens", "temperature", "top_p", "seed")
        # A value that is wrong is said before the model is loaded.
        SamplingParams(**given)
        if isinstance(sys.stdin, io.TextIOWrapper):
            # Bytes that are no UTF-8 arrive as lone surrogates, and cost one message, not all.
            sys.stdin.reconfigure(errors="surrogateescape")
        with load_aloud(arguments, max_requests=1) as llm:
            params = llm.defaults.params(given, {"max_tokens": 512, "temperature": 0.8})
            talk = _Conversation(llm, params, arguments.system)
            if sys.stdin.isatty():
                with suppress(ImportError):
                    # Arrow keys then edit the line, and bring back those before it.
                    import readline  # noqa: F401
                print(
                    "Write a message and press Enter. /help lists what else there is, Ctrl-D "
                    "leaves, Ctrl-C cuts an answer.",
                    file=sys.stderr,
                )
            while (line := _line()) is not None and line.rstrip() not in _LEAVE:
                talk.take(line)
            print_summary(llm, arguments, talk.seconds)
        return 2 if talk.num_left_out and not sys.stdin.isatty() else 0


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


@dataclass
class _Conversation:
    """What was said, and what each line does to it; see `ChatCommand.run`."""

    llm: LLM
    params: SamplingParams
    system: str | None
    num_left_out: int = 0
    seconds: float = 0.0
    """For all answers together."""
    turns: list[dict[str, object]] = field(default_factory=list)

    def take(self, line: str) -> None:
        """Do what a line asks for: answer it, begin anew, or list the words there are."""
        word = line.split(maxsplit=1)[0] if line.strip() else ""
        if not re.fullmatch(r"/[A-Za-z]+", word) or line[0] != "/":
            self.num_left_out += bool(word) and not self._answer(line)
        elif line.strip() == "/new":
            self.turns.clear()
        elif line.strip() == "/help":
            print("\n".join(f"{name:<7}{what}" for name, what in _WORDS.items()), file=sys.stderr)
        else:
            self.num_left_out += 1
            known = word in _WORDS or word in _LEAVE
            print(
                f"{word}: {'it stands alone on its line' if known else 'no such word'}. "
                f"There are {', '.join(_WORDS)}; a message that begins like one has a space before "
                "it.",
                file=sys.stderr,
            )

    def _answer(self, line: str) -> bool:
        """Write the answer, and add both to the turns; a Ctrl-C at a terminal cuts it.

        False if there is none: then the reason was written, and the turns are as they were.
        """
        llm = self.llm
        question: dict[str, object] = {"role": "user", "content": line}
        begun, written, most = time.perf_counter(), "", llm.max_model_len
        reason, length = None, 0
        try:
            prompt, settings = self._prompt([*self.turns, question])
            if len(prompt) >= most and len(self._prompt([question])[0]) < most:
                _say_full(f"has {len(prompt)} tokens with this message; the model reads {most - 1}")
                return False
            length = len(prompt)
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
            if llm.failure:
                # No other message would be answered.
                raise
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            print("This message is left out; the next may be another one.", file=sys.stderr)
            return False
        finally:
            self.seconds += time.perf_counter() - begun
        print()
        if reason == "length" and length >= most:
            _say_full(f"has {length} tokens, the most of this model, and the answer is cut off")
        self.turns += [question, {"role": "assistant", "content": written}]
        return True

    def _prompt(self, turns: list[dict[str, object]]) -> tuple[list[int], SamplingParams]:
        first: list[dict[str, object]] = []
        if self.system:
            first.append({"role": "system", "content": self.system})
        return self.llm.chat_prompt([*first, *turns], self.params)


def _say_full(found: str) -> None:
    print(f"The conversation {found}.", file=sys.stderr)
    print("Type /new to begin another one; what was said is then forgotten.", file=sys.stderr)


command = ChatCommand()
