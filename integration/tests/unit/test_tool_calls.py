"""Calls of functions in text: which texts a grammar allows, and what a reader finds in them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from pcomm.core.errors import ConfigError
from pcomm.inference import RequestOutput

openai_chat = pytest.importorskip("openai.types.chat")
llguidance = pytest.importorskip("llguidance")
pytest.importorskip("fastapi")

from pcomm.integration.huggingface.tokenizer import vocabulary_json  # noqa: E402
from pcomm.integration.serve.response_bodies import ChatReply, Usage  # noqa: E402
from pcomm.integration.serve.tools.call_format import CALL_FORMATS, call_format  # noqa: E402
from pcomm.integration.serve.tools.call_reader import FunctionCall, call_reader  # noqa: E402

HERMES, LLAMA = CALL_FORMATS["hermes"], CALL_FORMATS["llama3"]
NAMES = ("f", "g")
ARGUMENTS = {"a": "</tool_call> {;é"}
BODY = json.dumps({"name": "f", "arguments": ARGUMENTS})
MARKED = f"<tool_call>\n{BODY}\n</tool_call>"
BARE = '{"name": "g", "parameters": {}}'
F, G = FunctionCall("f", json.dumps(ARGUMENTS)), FunctionCall("g", "{}")


def read(form: Any, *parts: str) -> list[str | FunctionCall]:
    """What a reader finds in a text that comes in parts, with neighbouring texts as one."""
    reader = call_reader(form, NAMES)
    found: list[str | FunctionCall] = []
    for place, part in enumerate(parts):
        for one in reader.read(part, is_end=place == len(parts) - 1):
            if isinstance(one, str) and found and isinstance(found[-1], str):
                found[-1] += one
            else:
                found.append(one)
    return found


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (HERMES, "", []),
        (HERMES, " plain <tool ", [" plain <tool "]),
        (HERMES, MARKED, [F]),
        (HERMES, f"one \n{MARKED}\n {MARKED}\ntwo ", ["one", F, F, "two "]),
        (HERMES, MARKED.replace("\n", ""), [F]),
        (HERMES, f'<tool_call>{{"name": "f{MARKED}', ['<tool_call>{"name": "f', F]),
        # Cut off, another function, no JSON, no JSON either, and more than a call.
        (HERMES, MARKED[:-1], [MARKED[:-1]]),
        *(
            (HERMES, text, [text])
            for text in (
                f"<tool_call>{BARE.replace('g', 'h')}</tool_call>",
                "<tool_call>{'name': 'f'}</tool_call>",
                '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
                '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
                '<tool_call>{"name": "f", "arguments": {}, "why": ""}</tool_call>',
                '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
                '<tool_call>{"name": {}, "arguments": {}}</tool_call>',
                "<tool_call>" + "[" * 5_000 + "</tool_call>",
            )
        ),
        (LLAMA, "", []),
        (LLAMA, BARE, [G]),
        (LLAMA, f"\n{BARE}; {BARE}\n", [G, G]),
        (LLAMA, '{"type": "function", ' + BARE[1:], [G]),
        *(
            (LLAMA, text, [text])
            for text in (" ", f"a {BARE}", f"{BARE} a", BARE[:-1], '{"a": 1}', f"{BARE}; {{}}")
        ),
    ],
)
def test_what_is_a_whole_call_is_one_and_all_else_is_text(form, text, expected):
    assert read(form, text) == expected


WORDS = ("<tool_call>", "</tool_call>", "<tool_", "\n", " ", "x", '"', "\\", "{", "; ", BODY, BARE)


@given(st.lists(st.sampled_from((*WORDS, MARKED)), max_size=7).map("".join), st.data())
def test_where_a_text_is_cut_changes_nothing(text, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    parts = [text[a:b] for a, b in pairwise(cuts)] or [""]
    for form in (HERMES, LLAMA):
        found = read(form, text)
        assert read(form, *parts) == found
        # Nothing is lost: without blanks, the texts and the calls are the text.
        if all(isinstance(one, str) for one in found):
            assert "".join(map(str, found)) == text


QWEN = (
    r"""{%- if tools %}{{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}" }}"""
)
LLAMA_3 = """{%- if tools is not none %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument' }}"""
QWEN_CODER = "{%- if tools %}<tool_call>\n<function=example>\n</tool_call>"
GLM = '{% if tools %}<tool_call>{name}\n<arg_key>{key}</arg_key>\n{"arguments": 1}'


@pytest.mark.parametrize(
    ("template", "expected"),
    [(QWEN, HERMES), (LLAMA_3, LLAMA), (QWEN_CODER, None), (GLM, None), ("{{ messages }}", None)],
)
def test_the_template_says_how_calls_are_written(template, expected):
    assert call_format(template) is expected
    assert call_format(template, "llama3") is LLAMA
    with pytest.raises(ConfigError, match="hermes, llama3"):
        call_format(template, "hermse")


@pytest.fixture(scope="module")
def words() -> tuple[tokenizers.Tokenizer, Any]:
    """A tokenizer to whose words the marks belong, as to Qwen's, and what grammars make of it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([MARKED, BARE], trainer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    size = tokenizer.get_vocab_size()
    return tokenizer, llguidance.LLTokenizer(vocabulary_json(tokenizer.to_str()), size, [0])


def mark(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


ONE, TWO = '{"name": "f", "KEY": {"a": 1, "b": [true, null]}}', '{"name": "g", "KEY": {}}'
WRONG = ('{"name": "f", "KEY": {"a": "1", "b": []}}', '{"name": "h", "KEY": {}}', '{"a": 1}')
ANSWER = '{"x": 1}'
# What a text is made of, and for which settings it is right: `must_call`, `has_many`, an answer.
TEXTS: list[tuple[list[str], str]] = [
    ([], "free"),
    (["So. "], "free"),
    ([ANSWER], "free answer"),
    ([ONE], "any"),
    ([TWO], "any"),
    *(([one], "never") for one in WRONG),
    ([ONE, TWO], "many"),
    (["So. ", ONE], "free call behind text"),
    ([ONE, " So."], "never"),
]


@pytest.mark.parametrize("must_call", [False, True])
@pytest.mark.parametrize("has_many", [False, True])
@pytest.mark.parametrize(
    ("form", "answer"),
    [(HERMES, None), (HERMES, {"properties": {"x": {}}, "required": ["x"]}), (LLAMA, None)],
)
def test_the_grammar_allows_right_calls_alone(form, must_call, has_many, answer, words):
    schemas: dict[str, dict[str, Any]] = {
        "f": {
            "properties": {"a": {"type": "integer"}, "b": {"items": {"$ref": "#/$defs/c"}}},
            "required": ["a", "b"],
            "$defs": {"c": {"type": ["boolean", "null"]}},
        },
        "g": {"type": "object", "properties": {}, "additionalProperties": False},
    }
    grammar = form.grammar(schemas, must_call=must_call, has_many=has_many, answer=answer)
    matcher = llguidance.LLMatcher(words[1], grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    is_free = not must_call and answer is None
    for parts, rule in TEXTS:
        calls = [one for one in parts if one[0] == "{" and one != ANSWER]
        text = "".join(
            ("\n" if calls[1:] and one == TWO else "") + mark(one)
            if one in calls and form is HERMES
            else one
            for one in parts
        ).replace("KEY", form.arguments)
        # A text of Llama's that begins like JSON is a call; Hermes' has a mark.
        is_json = text.startswith("{") and form is LLAMA
        expected = {
            "free": is_free,
            "free answer": not must_call if answer else is_free and not is_json,
            "any": True,
            "never": False,
            "many": has_many and form is HERMES,
            "free call behind text": is_free,
        }[rule]
        ids = words[0].encode(text).ids
        fed = matcher.deep_copy()
        is_right = fed.try_consume_tokens(ids) == len(ids) and fed.is_accepting()
        assert is_right == expected, (text, grammar)


class Texts:
    """Tokens have no text here."""

    def bytes_of(self, token_id: int) -> bytes:
        return b""


def reply(form: Any) -> ChatReply:
    return ChatReply(
        "x",
        "m",
        Texts(),  # type: ignore[arg-type]
        num_texts=2,
        has_usage=False,
        has_logprobs=False,
        reader=lambda: call_reader(form, NAMES),
    )


@pytest.mark.parametrize(
    ("form", "text", "content", "calls", "reason"),
    [
        (HERMES, f"So.\n{MARKED}\n{MARKED}", "So.", [F, F], "tool_calls"),
        (LLAMA, BARE, None, [G], "tool_calls"),
        (HERMES, f"{MARKED}\n{MARKED[:-3]}", MARKED[:-3], [F], "length"),
        (LLAMA, BARE[:-3], BARE[:-3], [], "length"),
        (LLAMA, "So.", "So.", [], "stop"),
    ],
)
def test_streams_and_answers_are_those_of_the_openai_client(form, text, content, calls, reason):
    ended = "length" if reason == "length" else "stop"
    outputs = [RequestOutput("x-0", (1,), text=one) for one in text]
    outputs.append(RequestOutput("x-0", (1,), finish_reason=ended))
    whole = reply(form).whole([outputs, outputs], Usage([1]))
    choice = openai_chat.ChatCompletion.model_validate(whole, strict=True).choices[1]
    assert (choice.message.content, choice.finish_reason) == (content, reason)
    found = choice.message.tool_calls or []
    assert [FunctionCall(one.function.name, one.function.arguments) for one in found] == calls
    assert len({one.id for one in found}) == len(calls)
    streamed = reply(form)
    parts = [part for output in outputs for part in streamed.chunks(1, output)]
    deltas = []
    for part in parts:
        chunk = openai_chat.ChatCompletionChunk.model_validate(part, strict=True)
        assert chunk.choices[0].index == 1
        deltas.append(chunk.choices[0])
    assert [one.finish_reason for one in deltas] == [None] * (len(deltas) - 1) + [reason]
    assert deltas[0].delta.role == "assistant"
    assert "".join(one.delta.content or "" for one in deltas) == (content or "")
    # As clients put calls together: by index, name and id once, arguments added up.
    together: dict[int, list[str]] = {}
    for one in deltas:
        for call in one.delta.tool_calls or ():
            if call.index not in together:
                assert call.id
                assert call.type == "function"
                together[call.index] = [call.function.name, ""]
            together[call.index][1] += call.function.arguments
    assert [FunctionCall(*one) for one in together.values()] == calls
