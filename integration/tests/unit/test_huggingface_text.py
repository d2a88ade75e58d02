"""Tokenizer and chat template of a directory, against those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integration_support.huggingface_directories import CHAT_TEMPLATE, write_tokenizer
from pcomm.core.errors import ConfigError
from pcomm.inference import Tokenizer
from pcomm.integration.huggingface import (
    ChatTemplate,
    ModelDirectory,
    open_directory,
    read_chat_template,
    read_tokenizer,
)

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("text")
    write_tokenizer(made, ["the cat sat on the mat", "grüße 猫 🙂"] * 3)
    (made / "config.json").write_text('{"model_type": "llama", "eos_token_id": 1}')
    return made


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def opened(folder: Path) -> ModelDirectory:
    return open_directory(folder, has_weights=False)


TEXTS = ["", "the cat", "  two\n\nlines ", "grüße 猫 🙂", "<s>the</s> mat", "\x00\ud7ff"]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_transformers(text, folder, theirs):
    ours = read_tokenizer(opened(folder))
    as_protocol: Tokenizer = ours
    assert ours.encode_prompt(text) == theirs(text)["input_ids"]
    assert as_protocol.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
    ids = ours.encode_prompt(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": " What is 2 < 3? "}],
    "several": [
        {"role": "system", "content": "Be brief. Ünï🙂"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "reasoning": "greet"},
        {"role": "user", "content": "Bye"},
    ],
    "nothing said": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "reasoning": None, "thinking": "so"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}],
}
TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "tokens": "{{ bos_token }}{% for m in messages %}{{ m.role }}{% endfor %}{{ eos_token }}",
    "json": "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}"
    "{{ tools | tojson }}{{ documents is none }}",
    "state": "{% set ns = namespace(last='') %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = m.role ~ loop.index %}{% endif %}{% endfor %}{{ ns.last }}",
    "break": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ m['role'] }}{% endfor %}",
    "blocks": "{% for m in messages %}\n    {% if true %}\n  {{ m.role }}\n    {% endif %}\n"
    "{% endfor %}\n",
    "generation": "{% generation %}{{ messages[0].role }}{% endgeneration %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}",
    "variables": "{{ enable_thinking is defined and enable_thinking }}{{ dict(a=1)['a'] }}",
    "macro": "{% macro say(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}"
    "{{ say(m) }}{% endfor %}{{ messages | length }}{{ messages | map(attribute='role') | list }}",
    "methods": "{% for m in messages %}{{ m.role.upper().replace('U', 'u') }}{{ m.items() | list }}"
    "{% endfor %}",
    "a year": "{{ strftime_now('%Y') | length }}",
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_equal_transformers(name, theirs):
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    for chat in CHATS.values():
        for settings in ({}, {"add_generation_prompt": False}, {"tools": TOOLS}):
            options: dict[str, Any] = {"add_generation_prompt": True, **settings}
            variables = {"enable_thinking": True}
            expected = theirs.apply_chat_template(
                chat, chat_template=TEMPLATES[name], tokenize=False, **options, **variables
            )
            assert ours.render(chat, **options, **variables) == expected


def test_what_a_template_refuses_is_an_error_of_ours():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match="roles must alternate\nThe template of the model"):
        template.render([{"role": "user", "content": "a"}])


HOSTILE = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['json'] }}",
    "builtins": "{{ namespace.__init__.__globals__ }}",
    "hidden name": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns }}",
    "hidden name at once": "{{ namespace(_x=1) }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "changes its input": "{{ messages.append(1) }}",
    "memory": "{{ range(1000000000) | list }}",
    "import": "{% import 'os' as os %}{{ os }}",
    "file": "{% include '/etc/passwd' %}",
    "error of Python": "{{ 1 + 'a' }}",
    "division": "{{ 1 / 0 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "missing": "{{ nothing.more }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_does_nothing(name):
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate(HOSTILE[name]).render([{"role": "user", "content": "a"}])


def test_objects_reach_a_template_as_their_name():
    """A path has methods that delete files; the template sees none of them."""
    text = ChatTemplate("{{ messages[0].content }}").render([{"content": Path("/tmp/x")}])
    assert text == "<PosixPath>"


@pytest.mark.parametrize("source", ["{% if %}", "{{ ", "{% for x in y %}", "{% unknown %}"])
def test_what_is_no_template(source):
    with pytest.raises(ConfigError, match="TemplateSyntaxError"):
        ChatTemplate(source)


def template_of(folder: Path, **files: object) -> str | None:
    (folder / "config.json").write_text("{}")
    for name, content in files.items():
        path = folder / {"config": "tokenizer_config.json", "old": "chat_template.json"}.get(
            name, "chat_template.jinja"
        )
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    found = read_chat_template(opened(folder))
    return None if found is None else found.render([])


def test_where_the_template_is_found(folder, tmp_path):
    """As in transformers: a file goes before a setting, and of several the default is taken."""
    assert template_of(tmp_path) is None
    assert template_of(tmp_path, old={"chat_template": "old"}) == "old"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert template_of(tmp_path, config={"chat_template": named}) == "d"
    with_tools = read_chat_template(opened(tmp_path))
    assert with_tools is not None
    assert (with_tools.render([], tools=[]), with_tools.tool_source) == ("t", "t")
    setting = {"chat_template": "{{ bos_token }}", "bos_token": {"content": "<s>"}}
    assert template_of(tmp_path, config=setting) == "<s>"
    assert template_of(tmp_path, file="file") == "file"
    assert read_chat_template(opened(folder)) is not None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [5, 7, 5]}, "config": {"eos_token_id": 9}}, (5, 7)),
        ({"generation_config": {}, "config": {"eos_token_id": 9}}, (9,)),
        ({"config": {}, "tokenizer_config": {"eos_token": "</s>"}}, (1,)),
        ({"config": {}, "tokenizer_config": {"eos_token": {"content": "</s>"}}}, (1,)),
        ({"config": {}, "tokenizer_config": {"eos_token": "none such"}}, ()),
        ({"config": {}, "tokenizer_config": {}}, ()),
    ],
)
def test_the_ids_that_end_a_text(files, expected, folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert read_tokenizer(opened(tmp_path)).eos_ids == expected


@pytest.mark.parametrize("value", [-1, "2", [], [1, None], True])
def test_an_end_that_is_no_id(value, folder, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match=r"config\.json: eos_token_id"):
        read_tokenizer(opened(tmp_path))
