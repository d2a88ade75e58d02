"""Tools, template variables and grammars over HTTP, as OpenAI's own client sends and reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from integration_support.huggingface_directories import write_directory, write_tokenizer
from pcomm.core.errors import ConfigError
from pcomm.integration.llm import LLM

httpx = pytest.importorskip("httpx2")
openai = pytest.importorskip("openai")
transformers = pytest.importorskip("transformers")
pytest.importorskip("llguidance")
pytest.importorskip("uvicorn")

from integration_support.live_server import LiveServer  # noqa: E402
from pcomm.integration.serve.request_bodies import ChatRequest  # noqa: E402
from pcomm.integration.serve.tools.call_format import CALL_FORMATS  # noqa: E402
from pcomm.integration.serve.tools.tool_use import ToolUse, plain_messages  # noqa: E402

# In the manner of Qwen's and Llama's.
HERMES = r"""{%- if tools %}{{ '<s>system\n<tools>' }}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
{{- '\n</tools>\n<tool_call>\n{"name": <name>, "arguments": <args>}\n</tool_call></s>\n' }}
{%- endif %}
{%- for message in messages %}{{ '<s>' + message.role + '\n' }}
{%- if message.role == 'tool' %}{{ message.name + ': ' }}{% endif %}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}{{ '</s>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<s>assistant\n' }}
{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""
LLAMA = r"""{%- if tools is not none %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary}.\n' }}
{%- for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}{% endif %}
{%- for message in messages %}{{ '<s>' + message.role + '\n' + message.content + '</s>' }}
{%- endfor %}<s>assistant
"""

FIND = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 6, "pattern": "^[a-z]*$"},
        "unit": {"enum": ["C", "F", None]},
        "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    },
    "required": ["place", "unit"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"find": FIND, "stop-it": NOTHING}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


TOOLS = [tool("find", description="Weather é", parameters=FIND), tool("stop-it")]
STRICT = [tool("find", parameters=FIND, strict=True), tool("stop-it", strict=True)]
NAMED = {"type": "function", "function": {"name": "find"}}
ASKED = [{"role": "user", "content": "hi"}]


class Live:
    """A server of a random model, and its client."""

    def __init__(self, llm: LLM, url: str) -> None:
        self.llm, self.url = llm, url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def chat(self, **fields: Any) -> Any:
        given = {"model": "tiny", "messages": ASKED, "max_completion_tokens": 200, **fields}
        return self.client.chat.completions.create(**given)

    def mark(self) -> int:
        """The token that begins a call."""
        (found,) = self.llm.loaded.tokenizer.encode("<tool_call>")
        return found


def write_model(folder: Path, template: str) -> Path:
    write_directory(
        folder, "llama", vocab_size=330, max_position_embeddings=1024, num_hidden_layers=1
    )
    texts = ['<tool_call>\n{"name": "find", "arguments": {"place": "a", "unit": null}}', HERMES]
    write_tokenizer(folder, [*texts, '{"name": "stop-it", "parameters": {}}'])
    (folder / "chat_template.jinja").write_text(template)
    # Words of the vocabulary that are not special, as in Qwen's tokenizers.
    file = folder / "tokenizer.json"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.backend_tokenizer.save(str(file))
    return folder


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Live]]:
    """`live(name)`: a server whose model writes calls as Hermes or as Llama 3, started once."""
    started: dict[str, Live] = {}
    with ExitStack() as stack:

        def get(name: str) -> Live:
            if name not in started:
                template = {"hermes": HERMES, "llama3": LLAMA}[name]
                folder = write_model(tmp_path_factory.mktemp(name), template)
                llm = stack.enter_context(LLM(folder, memory_bytes=2**22, max_model_len=1024))
                server = stack.enter_context(LiveServer(llm))
                started[name] = Live(llm, server.url)
                stack.enter_context(started[name].client)
            return started[name]

        yield get


@pytest.fixture
def hermes(live: Callable[[str], Live]) -> Live:
    return live("hermes")


def checked(calls: Any) -> list[str]:
    """Names of calls, whose arguments satisfy their schemas."""
    for call in calls or ():
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        assert call.type == "function"
    return [call.function.name for call in calls or ()]


@pytest.mark.parametrize("name", ["hermes", "llama3"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tool_choice": "required"}, "(find|stop-it)( (find|stop-it))*"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "find|stop-it"),
        ({"tool_choice": NAMED}, "find"),
        ({"tool_choice": NAMED, "response_format": {"type": "json_object"}}, "find"),
    ],
)
def test_a_call_that_is_asked_for_is_right_in_answers_and_streams(name, fields, expected, live):
    found = live(name)
    answer = found.chat(tools=TOOLS, n=5, seed=3, temperature=1.5, **fields)
    all_names = set()
    for choice in answer.choices:
        names = checked(choice.message.tool_calls)
        assert re.fullmatch(expected, " ".join(names))
        assert choice.message.content is None
        assert choice.finish_reason == "tool_calls"
        all_names.update(names)
        assert name == "hermes" or len(names) == 1
    assert all_names == {*re.findall("find|stop-it", expected)}
    calls: list[dict[int, list[str]]] = [{} for _ in answer.choices]
    for part in found.chat(tools=TOOLS, n=5, seed=3, temperature=1.5, stream=True, **fields):
        (choice,) = part.choices
        for call in choice.delta.tool_calls or ():
            texts = calls[choice.index].setdefault(call.index, [call.function.name, ""])
            texts[1] += call.function.arguments
    assert [list(one.values()) for one in calls] == [
        [[call.function.name, call.function.arguments] for call in choice.message.tool_calls]
        for choice in answer.choices
    ]


@pytest.mark.parametrize("name", ["hermes", "llama3"])
def test_a_call_that_is_cut_off_is_text_and_a_whole_one_stays(name, live):
    found, fields = live(name), {"tools": TOOLS, "tool_choice": NAMED, "seed": 11}
    whole = found.chat(**fields)
    length = whole.usage.completion_tokens
    (call,) = whole.choices[0].message.tool_calls
    key = {"hermes": "arguments", "llama3": "parameters"}[name]
    full = f'{{"name": "find", "{key}": {call.function.arguments}}}'
    full = f"<tool_call>\n{full}\n</tool_call>" if name == "hermes" else full
    # The last token is the end, which may be left out.
    for most in (2, length // 2, length - 2, length - 1, length):
        answer = found.chat(**fields, max_completion_tokens=most).choices[0]
        parts = list(found.chat(**fields, max_completion_tokens=most, stream=True))
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        has_call = any(part.choices[0].delta.tool_calls for part in parts)
        reason = parts[-1].choices[0].finish_reason
        if answer.message.tool_calls:
            assert checked(answer.message.tool_calls) == ["find"]
            assert (text, has_call) == ("", True)
        else:
            assert answer.finish_reason == "length"
            assert most < length
            assert (text, has_call) == (answer.message.content, False)
            assert full.startswith(text)
        assert reason == answer.finish_reason == ("tool_calls" if most >= length else "length")


def test_a_model_that_may_call_is_held_to_strict_schemas_once_it_does(hermes):
    begins = {"logit_bias": {str(hermes.mark()): 60}, "temperature": 0.7, "n": 6, "seed": 1}
    for fields in ({"tools": STRICT}, {"tools": TOOLS, "parallel_tool_calls": False}):
        for choice in hermes.chat(**fields, **begins).choices:
            names = checked(choice.message.tool_calls)
            assert choice.finish_reason == "tool_calls"
            assert len(names) == 1 or "parallel_tool_calls" not in fields
    # Without a begin there is none, and text is what it was without tools.
    for choice in hermes.chat(tools=STRICT, n=6, seed=1, max_completion_tokens=9).choices:
        assert choice.message.tool_calls is None
        assert choice.finish_reason in ("length", "stop")
    # An answer in JSON, or a call.
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
    answers = [
        *hermes.chat(tools=TOOLS, response_format=form, n=8, seed=2).choices,
        *hermes.chat(tools=TOOLS, response_format=form, **begins).choices,
    ]
    texts = {one.message.content for one in answers if not checked(one.message.tool_calls)}
    assert texts <= {'"a"', '"b"'}
    assert texts
    assert any(one.finish_reason == "tool_calls" for one in answers)


def test_conversations_with_calls_are_rendered_as_transformers_does(hermes):
    called = {
        "id": "1",
        "type": "function",
        "function": {"name": "find", "arguments": '{"a": "é"}'},
    }
    answer = {"role": "assistant", "content": None, "tool_calls": [called], "refusal": None}
    result = {"role": "tool", "content": [{"type": "text", "text": "4 C"}], "tool_call_id": "1"}
    named = {"role": "tool", "content": "5 C", "tool_call_id": "1", "name": "other"}
    messages = [{"role": "developer", "content": "Be brief."}, *ASKED, answer, result, named]
    body = ChatRequest.model_validate({"model": "m", "messages": messages, "tools": TOOLS})
    loaded = hermes.llm.loaded
    tools = ToolUse(body, CALL_FORMATS["hermes"])
    plain = plain_messages(body.messages)
    function = {"name": "find", "arguments": {"a": "é"}}
    expected = [
        {"role": "system", "content": "Be brief."},
        *ASKED,
        {"role": "assistant", "content": "", "tool_calls": [{**called, "function": function}]},
        {"role": "tool", "name": "find", "content": "4 C", "tool_call_id": "1"},
        named,
    ]
    assert plain == expected
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(hermes.llm.path)
    nothing = {"type": "object", "properties": {}}
    offered = [TOOLS[0], tool("stop-it", parameters=nothing)]
    for variables in ({}, {"enable_thinking": False}):
        options = {"tools": offered, "add_generation_prompt": True, **variables}
        ids = theirs.apply_chat_template(expected, tokenize=True, return_dict=False, **options)
        assert loaded.chat_ids(plain, tools.descriptions, variables) == ids
        prompt, _ = hermes.llm.chat_prompt(expected, tools=offered, chat_template_kwargs=variables)
        assert prompt == ids
        given = {"messages": messages, "tools": TOOLS, "max_completion_tokens": 1}
        used = hermes.chat(**given, extra_body={"chat_template_kwargs": variables}).usage
        assert used.prompt_tokens == len(ids)
    # As if there were no tools.
    alone = hermes.chat(tools=TOOLS, tool_choice="none", max_completion_tokens=1)
    assert alone.usage.prompt_tokens == len(loaded.chat_ids(ASKED))


def test_a_template_that_adds_contents_reads_calls_that_have_none(live):
    """The loop of OpenAI's client, whose messages with calls have null as their content."""
    function = {"name": "find", "arguments": "{}"}
    called = {"id": "1", "type": "function", "function": function}
    answer = {"role": "assistant", "content": None, "tool_calls": [called]}
    result = {"role": "tool", "content": "4 C", "tool_call_id": "1"}
    chat = live("llama3").chat
    used = [
        chat(messages=[*ASKED, one, result], tools=TOOLS, max_completion_tokens=1).usage
        for one in (answer, answer | {"content": ""})
    ]
    assert used[0].prompt_tokens == used[1].prompt_tokens


def test_variables_of_the_server_are_those_of_requests_without_them(hermes):
    lengths = [
        len(hermes.llm.loaded.chat_ids(ASKED, None, {"enable_thinking": value}))
        for value in (False, True)
    ]
    defaults = {"enable_thinking": False}
    with (
        LLM(hermes.llm.path, memory_bytes=2**21) as llm,
        LiveServer(llm, chat_template_kwargs=defaults) as server,
    ):
        with Live(llm, server.url).client as client:
            for extra, length in (({}, lengths[0]), ({"enable_thinking": True}, lengths[1])):
                answer = client.chat.completions.create(
                    model="tiny",
                    messages=ASKED,
                    max_completion_tokens=1,
                    extra_body={"chat_template_kwargs": extra},
                )
                assert answer.usage.prompt_tokens == length
        for wrong in ({"tool_format": "mistral"}, {"chat_template_kwargs": {"messages": []}}):
            with pytest.raises(ConfigError):
                LiveServer(llm, **wrong)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"regex": "(ab|[0-9]){2,3}"}, "(ab|[0-9]){2,3}"),
        ({"choice": ["one", "one \n\"two'", "ü/"]}, "one( \n\"two')?|ü/"),
        ({"grammar": 'root ::= "[" ("a" | root) "]"'}, r"\[+a\]+"),
        ({"grammar": 'start: "x" WORD\nWORD: /[0-9]{1,2}/'}, "x[0-9]{1,2}"),
        ({"json": {"enum": [1, "é"]}}, '1|"é"'),
        ({"json": '{"enum": [1, "é"]}'}, '1|"é"'),
        ({"json_object": True, "json": None}, r"(?s)\{.*"),
    ],
)
def test_structured_outputs_bind_texts_of_both_routes(fields, expected, hermes):
    extra = {"extra_body": {"structured_outputs": fields}}
    chosen = hermes.chat(n=8, **extra).choices
    texts = [choice.message.content for choice in chosen]
    completed = hermes.client.completions.create(
        model="tiny", prompt="a", n=8, max_tokens=200, **extra
    )
    texts += [choice.text for choice in completed.choices]
    for text, choice in zip(texts, [*chosen, *completed.choices], strict=True):
        assert re.fullmatch(expected, text) or choice.finish_reason == "length"
    assert any(choice.finish_reason == "stop" for choice in chosen)
    assert len(set(texts)) > 1


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def called(**function: Any) -> dict[str, Any]:
    changed = {**CALL, "function": {"name": "f", "arguments": "{}", **function}}
    return {"messages": [*ASKED, {"role": "assistant", "tool_calls": [changed]}]}


def grammar(**fields: Any) -> dict[str, Any]:
    return {"extra_body": {"structured_outputs": fields}}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "web"}]}, "tools.0.type", ""),
    ({"tools": [tool("a b")]}, "tools.0.function.name", "pattern"),
    ({"tools": [tool("a" * 65)]}, "tools.0.function.name", "pattern"),
    ({"tools": [tool("a"), tool("a")]}, "tools.1.function.name", "Two tools"),
    ({"tools": [tool("a", parameters=[])]}, "tools.0.function.parameters", "dictionary"),
    (
        {"tools": [tool("a", parameters={"type": "string"})]},
        "tools.0.function.parameters",
        "an object",
    ),
    (
        {"tools": [tool("a", parameters={"x": "\ud800"})]},
        "tools.0.function.parameters",
        "surrogates",
    ),
    ({"tools": [tool(str(n)) for n in range(129)]}, "tools", "at most 128"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'required'"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice.function.name",
        "not in tools",
    ),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    (
        {"tools": [tool("a", parameters={"properties": {"b": {"type": "x"}}}, strict=True)]},
        "tools",
        "Invalid type: x",
    ),
    ({"messages": [{"role": "assistant"}]}, "messages.0.content", "tool_calls"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.tool_call_id", "missing"),
    ({"messages": [{"role": "cook", "content": "a"}]}, "messages.0", "'user'"),
    (called(arguments="{"), "messages.1.tool_calls.0.function.arguments", "no JSON"),
    (called(arguments="[]"), "messages.1.tool_calls.0.function.arguments", "no object"),
    (called(arguments='["\\ud800"]'), "messages.1.tool_calls.0.function.arguments", "object"),
    (called(arguments=None), "messages.1.tool_calls.0.function.arguments", "string"),
    ({"extra_body": {"chat_template_kwargs": []}}, "chat_template_kwargs", "dictionary"),
    ({"extra_body": {"chat_template_kwargs": {"tools": []}}}, "chat_template_kwargs", "tools"),
    ({"extra_body": {"chat_template_kwargs": {"self": 1}}}, "chat_template_kwargs", "self"),
    (grammar(), "structured_outputs", "none was given"),
    (grammar(regex="a", choice=["a"]), "structured_outputs", "regex, choice was given"),
    (grammar(regex="("), "structured_outputs.regex", "unclosed group"),
    (grammar(grammar="start: a"), "structured_outputs.grammar", "unknown name"),
    (grammar(json="{"), "structured_outputs.json", "no JSON"),
    (grammar(json={"type": "x"}), "structured_outputs.json", "Invalid type: x"),
    (grammar(choice=[]), "structured_outputs.choice", "at least 1"),
    (grammar(choice=["x" * 70_000]), "structured_outputs.choice", "bytes"),
    (grammar(regx="a"), "structured_outputs.regx", "not known"),
    ({**grammar(regex="a"), "tools": TOOLS}, "structured_outputs", "and tools"),
    (
        {**grammar(regex="a"), "response_format": {"type": "json_object"}},
        "structured_outputs",
        "and response_format",
    ),
]


def test_bad_input_is_an_error_that_names_the_field(hermes):
    for fields, param, message in BAD:
        # Not by OpenAI's client, which itself refuses some of them.
        given = {"model": "tiny", "messages": ASKED, "max_tokens": 9, **fields}
        given |= given.pop("extra_body", {})
        url, kind = f"{hermes.url}/v1/chat/completions", {"Content-Type": "application/json"}
        answer = httpx.post(url, content=json.dumps(given), headers=kind)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert (error["param"], error["type"]) == (param, "invalid_request_error"), error
        assert message in error["message"]


def test_an_answer_in_json_cannot_be_told_from_a_bare_call(live):
    form = {"type": "json_object"}
    with pytest.raises(openai.BadRequestError) as caught:
        live("llama3").chat(tools=TOOLS, response_format=form)
    assert caught.value.body["param"] == "response_format"
