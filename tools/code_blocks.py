"""The fenced code blocks of a Markdown page, and a program made of its Python blocks."""

import re
from dataclasses import dataclass

# A block directly after this comment is not run, for the reason given: <!-- not run: two GPUs -->
_NOT_RUN = re.compile(r"<!--\s*not run:\s*(?P<reason>.+?)\s*-->")
_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})\s*(?P<language>\w*)")


@dataclass(frozen=True)
class CodeBlock:
    """One fenced block.

    Args:
        language: The word after the fence, or an empty string.
        text: The lines between the fences, without their common indentation.
        line: The line of the page where `text` starts, counted from 1.
        not_run: Why the page says that the block is not run, or an empty string.
    """

    language: str
    text: str
    line: int
    not_run: str


def code_blocks(page: str) -> list[CodeBlock]:
    """All fenced blocks of a page, in order; an unclosed one ends with the page."""
    blocks: list[CodeBlock] = []
    fence = indent = language = reason = ""
    start = 0
    inside: list[str] = []
    for number, line in enumerate(page.splitlines(), start=1):
        if not fence:
            if mark := _NOT_RUN.search(line):
                reason = mark["reason"]
            elif opening := _FENCE.match(line):
                indent, fence, language = opening["indent"], opening["fence"], opening["language"]
                start, inside = number + 1, []
            elif line.strip():
                reason = ""
        elif line.strip() == fence:
            blocks.append(CodeBlock(language, "\n".join(inside) + "\n", start, reason))
            fence = reason = ""
        else:
            inside.append(line.removeprefix(indent))
    if fence:
        blocks.append(CodeBlock(language, "\n".join(inside) + "\n", start, reason))
    return blocks


def program(blocks: list[CodeBlock]) -> str:
    """The Python blocks in order, on the lines where the page has them, so tracebacks fit."""
    lines: list[str] = []
    for block in blocks:
        if block.language == "python" and not block.not_run:
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.text.splitlines()
    return "\n".join(lines) + "\n" if lines else ""
