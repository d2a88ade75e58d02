"""Chat templates: those of a directory, rendered in a sandbox, and a plain one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pcomm.core.errors import ConfigError
from pcomm.integration.huggingface.directory import ModelDirectory

__all__ = [
    "ChatTemplate",
    "check_variables",
    "plain_chat",
    "read_chat_template",
    "special_tokens",
]

Message = Mapping[str, Any]
_FILE, _OLD_FILE, _TOKENIZER = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_OWN_NAMES = {"add_generation_prompt", "documents", "messages", "self", "tools"}
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """Renders messages as the model was trained to read them.

    Args:
        source: Template in jinja2's language.
        special_tokens: Texts of `bos_token`, `eos_token` and others, which templates name.
        where: Name of the file, for errors.
        tool_source: Another template for conversations with tools; None for the same.

    Attributes:
        source: Template of conversations.
        tool_source: Template of those with tools.

    Raises:
        ConfigError: The source is no template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        where: str = "template",
        tool_source: str | None = None,
    ) -> None:
        self.source, self._special, self._where = source, dict(special_tokens or {}), where
        self.tool_source = source if tool_source is None else tool_source
        try:
            self._template = _environment().from_string(source)
            self._tool_template = _environment().from_string(self.tool_source)
        except (TemplateError, RecursionError) as error:
            raise self._failed(error) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation. Local.

        Args:
            messages: Mappings with `role` and `content`, as the OpenAI API has them.
            tools: Descriptions of tools, as JSON schemas.
            add_generation_prompt: True to end with the beginning of an answer.
            variables: More variables that the template may ask for, such as `enable_thinking`.

        Raises:
            ConfigError: The template refuses these messages, or does what the sandbox forbids.
        """
        # As transformers does: a key without a value is one that the message does not have.
        given = [{k: v for k, v in one.items() if v is not None} for one in messages]
        plain = _plain([_with_reasoning(message) for message in given])
        template = self._template if tools is None else self._tool_template
        try:
            return template.render(
                **{**self._special, **_plain(variables)},
                messages=plain,
                tools=_plain(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        # A template can fail like any program: a sum of a number and a text, a missing key.
        except (
            TemplateError,
            TypeError,
            ValueError,
            KeyError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"chat template {self._where}",
            found=f"{type(error).__name__}: {error}",
            why="The template of the model refuses the messages, or cannot be rendered.",
            fix="Send messages of the roles and in the order that the model knows, or a prompt "
            "without a template.",
        )


def check_variables(variables: Mapping[str, Any]) -> None:
    """Refuse variables of names that `ChatTemplate.render` has for something else. Local.

    Raises:
        ConfigError: One of them is `messages`, `tools`, or another such name.
    """
    if taken := sorted(_OWN_NAMES & set(variables)):
        raise ConfigError(
            "chat_template_kwargs",
            found=", ".join(taken),
            why="The template gets these from the conversation and the tools.",
            fix="Leave them out; messages and tools are given by themselves.",
        )


def read_chat_template(directory: ModelDirectory) -> ChatTemplate | None:
    """The chat template of a directory; None if it has none. Local.

    Of several it is the one named `default`, and for tools `tool_use`, as in transformers.

    Raises:
        ConfigError: A file of it is damaged.
    """
    settings = directory.json(_TOKENIZER)
    special = special_tokens(settings)
    if (text := directory.text(_FILE)) is not None:
        return ChatTemplate(text, special, where=str(directory.folder / _FILE))
    for name in (_TOKENIZER, _OLD_FILE):
        found = (settings if name == _TOKENIZER else directory.json(name)).get("chat_template")
        tool_source = None
        if isinstance(found, list):
            named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            found, tool_source = named.get("default"), named.get("tool_use")
        if isinstance(found, str):
            where = str(directory.folder / name)
            return ChatTemplate(found, special, where=where, tool_source=tool_source)
    return None


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The texts of named tokens in a `tokenizer_config.json`. Local."""
    found = {}
    for name in _SPECIAL:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


class _Generation(Extension):
    """`{% generation %}`, by which training finds the answers; the text within is as it is."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class _Dict:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace that takes no names of Python's own."""

    def __init__(*args: Any, **values: Any) -> None:
        # As jinja2's, so that a template may have a variable of the name `self`.
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **values)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes what HTML would take for tags.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _with_reasoning(message: Message) -> Message:
    """The reasoning of a message under each name that templates read it by."""
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if found is None:
        return message
    return {"thinking": found, **message, "reasoning_content": found}


def _plain(value: Any) -> Any:
    """`value` made of JSON's types alone, so that a template meets no method that acts."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


_PLAIN_SOURCE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

_PLAIN_STOP = ("\nuser:", "\nsystem:")


def plain_chat() -> tuple[ChatTemplate, tuple[str, ...]]:
    """A template, and the strings that end an answer under it. Local.

    A model that was trained on text alone continues the conversation like any text, and would go on
    with the next question by itself.
    """
    return ChatTemplate(_PLAIN_SOURCE, where="for models without one"), _PLAIN_STOP
