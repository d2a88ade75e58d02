"""Conversations for a model that has no chat template: lines of a role and what it says."""

from __future__ import annotations

from pcomm.integration.huggingface import ChatTemplate

__all__ = ["plain_chat"]

_SOURCE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_STOP = ("\nuser:", "\nsystem:")


def plain_chat() -> tuple[ChatTemplate, tuple[str, ...]]:
    """A template, and the strings that end an answer under it. Local.

    A model that was trained on text alone continues the conversation like any text, and would go on
    with the next question by itself.
    """
    return ChatTemplate(_SOURCE, where="for models without one"), _STOP
