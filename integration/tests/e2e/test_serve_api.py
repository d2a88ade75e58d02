"""The server as OpenAI's own client sees it, over the loopback, with a model of each kind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from integration_support.short_runs import PATTERNS, tiny_run
from pcomm.core.testing.programs import wait_until
from pcomm.inference import SamplingParams
from pcomm.integration.llm import LLM

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")
pytest.importorskip("uvicorn")

from integration_support.live_server import LiveServer  # noqa: E402

MESSAGES = [{"role": "user", "content": "word1 word2"}]
CONTEXT = 256


class Live:
    """A server, its model and a client of it."""

    def __init__(self, llm: LLM, server: LiveServer) -> None:
        self.llm, self.server = llm, server
        options = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
        self.client = openai.OpenAI(**options)

    def chat(self, **fields: Any) -> Any:
        given = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 12, **fields}
        return self.client.chat.completions.create(**given)

    def complete(self, **fields: Any) -> Any:
        given = {"model": "tiny", "prompt": "word1 word2", "max_tokens": 12, **fields}
        return self.client.completions.create(**given)

    def post(
        self, body: Any, path: str = "completions", kind: str | None = "application/json"
    ) -> Any:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {} if kind is None else {"Content-Type": kind}
        return httpx.post(f"{self.server.url}/v1/{path}", content=content, headers=headers)

    def is_free(self) -> bool:
        stats = self.server.stats()
        used = (stats.running, stats.waiting, stats.blocks.used, stats.state_slots.used)
        return used == (0, 0, 0, 0) and self.server.served.service.streams.num_open == 0


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Live]]:
    """`live(name)`: a server for one of `PATTERNS`, started once."""
    started: dict[str, Live] = {}
    with ExitStack() as stack:

        def get(name: str) -> Live:
            if name not in started:
                run = tiny_run(tmp_path_factory.mktemp(name), PATTERNS[name])
                llm = stack.enter_context(LLM(run, memory_bytes=2**21, max_model_len=CONTEXT))
                server = stack.enter_context(LiveServer(llm, max_body_bytes=100_000))
                started[name] = Live(llm, server)
                stack.enter_context(started[name].client)
            return started[name]

        yield get


@pytest.fixture
def hybrid(live: Callable[[str], Live]) -> Live:
    return live("hybrid")


@pytest.mark.parametrize("name", PATTERNS)
def test_chat_completions_and_streams_of_each_model_are_the_engines_text(name, live):
    found = live(name)
    # The engine of a second LLM, so that the server keeps its own to itself.
    greedy = SamplingParams(temperature=0, max_tokens=12)
    with LLM(found.llm.path, memory_bytes=2**21, max_model_len=CONTEXT) as alone:
        expected = alone.generate("word1 word2", greedy)[0]
        ids, settings = alone.chat_prompt(MESSAGES, greedy)
        answer = alone.generate([ids], settings)[0]
    whole = found.complete(temperature=0)
    assert whole.choices[0].text == expected.text
    assert whole.choices[0].finish_reason == expected.finish_reason
    assert whole.usage.prompt_tokens == len(expected.prompt_ids)
    assert whole.usage.completion_tokens == len(expected.token_ids)
    assert whole.usage.total_tokens == len(expected.prompt_ids) + len(expected.token_ids)
    message = found.chat(temperature=0).choices[0]
    assert (message.message.role, message.message.content) == ("assistant", answer.text)
    usage = {"include_usage": True}
    parts = list(found.chat(temperature=0, stream=True, stream_options=usage))
    assert "".join(p.choices[0].delta.content or "" for p in parts[:-1]) == answer.text
    assert [p.choices[0].delta.role for p in parts[:2]] == ["assistant", None]
    assert parts[-2].choices[0].finish_reason == answer.finish_reason
    assert (parts[-1].choices, parts[-1].usage.prompt_tokens) == ([], len(answer.prompt_ids))
    assert parts[-1].usage.completion_tokens == len(answer.token_ids)
    assert all(part.usage is None for part in parts[:-1])
    text = "".join(part.choices[0].text for part in found.complete(temperature=0, stream=True))
    assert text == expected.text


def test_n_texts_of_several_prompts_come_in_order_and_a_seed_repeats_them(hybrid):
    prompts = ["word1", "word2 word3"]
    first = hybrid.complete(prompt=prompts, n=3, seed=5)
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == list(range(6))
    assert len(set(texts)) == 6
    assert [c.text for c in hybrid.complete(prompt=prompts, n=3, seed=5).choices] == texts
    assert [c.text for c in hybrid.complete(prompt=prompts, n=3, seed=6).choices] != texts
    unseeded = [hybrid.complete().choices[0].text for _ in range(4)]
    assert len(set(unseeded)) > 1
    lengths = [len(hybrid.llm.loaded.prompt_ids(prompt)) for prompt in prompts]
    assert first.usage.prompt_tokens == sum(lengths)
    streamed = [""] * 6
    for part in hybrid.complete(prompt=prompts, n=3, seed=5, stream=True):
        streamed[part.choices[0].index] += part.choices[0].text
    assert streamed == texts


def test_token_ids_are_a_prompt_too(hybrid):
    ids = hybrid.llm.loaded.prompt_ids("word1 word2")
    expected = hybrid.complete(temperature=0).choices[0].text
    assert hybrid.complete(prompt=ids, temperature=0).choices[0].text == expected
    both = hybrid.complete(prompt=[ids, ids], temperature=0).choices
    assert [choice.text for choice in both] == [expected] * 2


def test_token_ids_that_the_model_has_not_are_the_prompts_error(hybrid):
    most = hybrid.llm.loaded.vocabulary
    for prompt in ([most], [10**7], [[1], [2, most]]):
        with pytest.raises(openai.BadRequestError) as caught:
            hybrid.complete(prompt=prompt)
        body = caught.value.body
        assert (body["param"], body["code"]) == ("prompt", "invalid_value")
        wrong = 10**7 if prompt == [10**7] else most
        expected = f"prompt: this model has the token ids 0 to {most - 1}, and not {wrong}."
        assert body["message"] == expected
    assert hybrid.complete(prompt=[most - 1]).usage.prompt_tokens == 1


def test_what_clients_send_that_asks_for_nothing_changes_nothing(hybrid):
    answer = hybrid.chat(temperature=0).choices[0].message
    nothing: dict[str, Any] = {
        "function_call": "none",
        "functions": [],
        "logit_bias": {},
        "max_tokens": 12,
        "metadata": {"for": "test"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "prompt_cache_retention": "in_memory",
        "reasoning_effort": "none",
        "response_format": {"type": "text"},
        "service_tier": "auto",
        "store": False,
        "tool_choice": "auto",
        "tools": [],
        "user": "me",
        "verbosity": "medium",
    }
    assert hybrid.chat(temperature=0, **nothing).choices[0].message.content == answer.content
    nulls = ("audio", "moderation", "prediction", "prompt_cache_options", "web_search_options")
    body = dict.fromkeys([*nulls, *nothing], None)
    empty = hybrid.chat(temperature=0, extra_body=body)
    assert empty.choices[0].message.content == answer.content
    usage = {"include_usage": True, "include_obfuscation": False}
    parts = list(hybrid.chat(temperature=0, stream=True, stream_options=usage))
    assert "".join(p.choices[0].delta.content or "" for p in parts[:-1]) == answer.content
    # As the client keeps it, with null for all that it has not.
    kept = answer.model_dump()
    assert None in kept.values()
    assert hybrid.chat(messages=[*MESSAGES, kept, *MESSAGES]).choices[0].finish_reason
    whole = hybrid.complete(temperature=0).choices[0].text
    one = hybrid.complete(temperature=0, best_of=1, echo=False, suffix="").choices[0].text
    assert one == whole


def test_logprobs_name_tokens_whose_bytes_are_the_text(hybrid):
    chat = hybrid.chat(temperature=0, logprobs=True, top_logprobs=3).choices[0]
    entries = chat.logprobs.content
    text = b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace")
    assert text == chat.message.content
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    # Greedy: the token is the likeliest, and logprobs descend.
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in entries)
    assert all(e.top_logprobs[0].logprob >= e.top_logprobs[2].logprob for e in entries)
    completion = hybrid.complete(temperature=0, logprobs=2).choices[0].logprobs
    assert len(completion.tokens) == len(completion.token_logprobs) == 12
    assert completion.text_offset[0] == 0
    parts = list(hybrid.complete(temperature=0, logprobs=2, stream=True))
    streamed = [token for part in parts for token in part.choices[0].logprobs.tokens]
    assert streamed == completion.tokens
    assert hybrid.chat(temperature=0).choices[0].logprobs is None


def test_a_stop_string_ends_the_text_before_it(hybrid):
    text = hybrid.complete(temperature=0).choices[0].text
    stop = text[4:6]
    choice = hybrid.complete(temperature=0, stop=["\0", stop]).choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    parts = hybrid.complete(temperature=0, stop=stop, stream=True)
    assert "".join(part.choices[0].text for part in parts) == text[: text.index(stop)]


def test_settings_reach_the_sampler(hybrid):
    token = hybrid.llm.loaded.tokenizer.encode("x")[0]
    biased = hybrid.complete(logit_bias={str(token): 100}, temperature=0, max_tokens=5)
    assert biased.choices[0].text == "xxxxx"
    # Each x takes 2 from the next one, and the bias is 100 once.
    punished = hybrid.complete(
        logit_bias={str(token): 100}, temperature=0, max_tokens=80, frequency_penalty=2
    )
    assert 5 < punished.choices[0].text.count("x") < 80
    greedy = hybrid.complete(temperature=0).choices[0].text
    assert hybrid.complete(extra_body={"top_k": 1}).choices[0].text == greedy
    assert hybrid.complete(top_p=1e-9).choices[0].text == greedy


def test_a_schema_binds_the_answer(hybrid):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"word": {"enum": ["one", "two"]}, "is_true": {"type": "boolean"}},
        "required": ["word", "is_true"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "words", "schema": schema}}
    answer = hybrid.chat(response_format=form, max_completion_tokens=100)
    found = json.loads(answer.choices[0].message.content)
    assert found.keys() == {"word", "is_true"}
    assert found["word"] in ("one", "two")
    assert answer.choices[0].finish_reason == "stop"
    streamed = hybrid.chat(response_format=form, max_completion_tokens=100, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in streamed)
    assert json.loads(text).keys() == {"word", "is_true"}


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools",
        "unsupported_parameter",
    ),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"store": True}, "store", "unsupported_parameter"),
    ({"service_tier": "flex"}, "service_tier", "unsupported_parameter"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "unsupported_parameter"),
    ({"verbosity": "low"}, "verbosity", "unsupported_parameter"),
    ({"modalities": ["text", "audio"]}, "modalities.1", "unsupported_parameter"),
    ({"audio": {"voice": "a", "format": "wav"}}, "audio", "unsupported_parameter"),
    ({"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
    (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]},
        "messages.0.tool_calls.0.type",
        "missing_parameter",
    ),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_value"),
    ({"max_tokens": 5}, "max_tokens", "invalid_value"),
    ({"extra_body": {"temprature": 1}}, "temprature", "unknown_parameter"),
    ({"temperature": 3}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"extra_body": {"seed": "1"}}, "seed", "invalid_value"),
    ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "missing_parameter"),
    (
        {"messages": [{"role": "user", "content": "x" * 2000}]},
        "messages",
        "context_length_exceeded",
    ),
    ({"logit_bias": {"100000": 1}}, "logit_bias", "invalid_value"),
    ({"extra_body": {"stream_options": {}}}, "stream_options", "invalid_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a", ""]}, "stop.1", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"extra_body": {"repetition_penalty": 0.009}}, "repetition_penalty", "invalid_value"),
    ({"extra_body": {"prompt": "a"}}, "prompt", "unknown_parameter"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages.0.content.0.text",
        "missing_parameter",
    ),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_CHATS)
def test_an_error_names_the_field(hybrid, fields, param, code):
    for stream in (False, True):
        if "stream_options" in fields.get("extra_body", {}) and stream:
            continue
        with pytest.raises(openai.BadRequestError) as caught:
            hybrid.chat(**fields, stream=stream)
        body = caught.value.body
        assert body.keys() == {"message", "type", "param", "code"}
        assert (body["param"], body["code"]) == (param, code)
        assert body["type"] == "invalid_request_error"
    assert hybrid.is_free()


def test_other_models_and_paths_are_not_found(hybrid):
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        hybrid.chat(model="gpt-5")
    with pytest.raises(openai.NotFoundError):
        hybrid.client.models.retrieve("gpt-5")
    (card,) = hybrid.client.models.list().data
    assert (card.id, card.max_model_len) == ("tiny", CONTEXT)
    assert hybrid.client.models.retrieve("tiny").id == "tiny"
    described = httpx.get(f"{hybrid.server.url}/openapi.json").json()["paths"]
    for method, path, status, code in (
        ("POST", "/v1/responses", 404, "not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("DELETE", "/nowhere", 404, "not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ):
        refused = httpx.request(method, f"{hybrid.server.url}{path}", json={})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (status, code)
        assert (error["type"], error["param"]) == ("invalid_request_error", None)
        assert f"{method} {path!r}" in error["message"]
        # A client of another API reads what there is; as the server's own description has it.
        for route, methods in described.items():
            for one in methods:
                assert f"{one.upper()} {route}" in error["message"].replace(":path", "")


def test_a_schema_that_cannot_compile_is_that_requests_error(hybrid):
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="json_schema"):
        hybrid.chat(response_format=form)
    assert hybrid.chat().choices[0].finish_reason


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999_983},
        {"const": "\ud800"},
        {"const": float("nan")},
        {"$ref": "#"},
        {"const": "x" * 70_000},
    ],
)
def test_a_schema_that_no_grammar_can_have_is_400(hybrid, schema):
    pytest.importorskip("llguidance")
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    fields = {"model": "tiny", "messages": MESSAGES, "response_format": named}
    answer = hybrid.post(fields, "chat/completions")
    assert answer.status_code == 400, answer.text
    assert len(answer.json()["error"]["message"].splitlines()) == 3
    assert hybrid.is_free()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ["a"] * 300}, "prompt: List should have at most 128 items"),
        ({"prompt": []}, "prompt: List should have at least 1 item"),
        ({"prompt": [[]]}, "prompt.0: List should have at least 1 item"),
        ({"response_format": {}}, "response_format is not a field of /v1/completions but of"),
        ({"max_completion_token": 1}, "Known here|max_tokens"),
    ],
)
def test_an_error_is_of_the_type_that_was_given(hybrid, fields, message):
    answer = hybrid.post({"model": "tiny", "prompt": "a", **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert re.search(message, error["message"])
    assert "max_completion_tokens" not in error["message"]
    assert error["param"] == message.split(":")[0] or ":" not in message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 50_000,
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
        b'{"model": "tiny", "prompt": [[]]}',
        b'{"model": "tiny", "prompt": [-1]}',
        b'{"model": "tiny", "prompt": [999999]}',
        b'{"model": "tiny", "prompt": "a", "stop": [""]}',
        b'{"model": "tiny", "prompt": "a", "max_tokens": 0}',
        b'{"model": "tiny", "prompt": ["a", "a"], "n": 65}',
    ],
)
def test_a_body_that_is_no_request_is_told_so(hybrid, body):
    answer = hybrid.post(body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (b"", "application/json", "The body is empty; send a JSON object."),
        (b"[]", "application/json", "The body is an array; send a JSON object."),
        (b'"a"', "application/json", "The body is a string; send a JSON object."),
        (b"null", "application/json", "The body is null; send a JSON object."),
        (b"true", "application/json", "The body is true or false; send a JSON object."),
        (b"NaN", "application/json", "The body is a number; send a JSON object."),
        (b'{"a": }', "application/json", "no JSON: Expecting value at character 6."),
        (b"[" * 50_000, "application/json", "no JSON: arrays or objects are nested too deeply."),
        (b'{"user": "\xff"}', "application/json", "no JSON: byte 10 is no UTF-8."),
        (b"1" * 5000, "application/json", "no JSON: a number in it is too long."),
        (
            b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
            "application/json",
            "temperature: Input should be a finite number",
        ),
        (
            b'{"model": "tiny", "prompt": "a", "\\ud800": 1}',
            "application/json",
            r"name of the field '\\ud800' has half of a surrogate pair",
        ),
        (b"{}", "text/plain", "sent with Content-Type 'text/plain'; send it with `Content-Type: a"),
        (b"{}", None, "sent without a type; send it with `Content-Type: application/json`."),
    ],
)
def test_a_body_that_cannot_be_read_is_told_what_is_wrong_with_it(hybrid, body, kind, message):
    answer = hybrid.post(body, kind=kind)
    assert answer.status_code == 400
    assert re.search(message, answer.json()["error"]["message"]), answer.text


def test_a_body_above_the_limit_is_refused_with_and_without_a_length(hybrid):
    head = b'{"model": "tiny", "max_tokens": 1, "prompt": "a", "user": "'
    fits = head + b"x" * (100_000 - len(head) - 2) + b'"}'
    assert hybrid.post(fits).status_code == 200
    assert hybrid.post(fits + b" ").status_code == 413
    url, kind = f"{hybrid.server.url}/v1/completions", {"Content-Type": "application/json"}
    chunks = [fits[:60_000], fits[60_000:]]
    assert httpx.post(url, content=iter(chunks), headers=kind).status_code == 200
    late = httpx.post(url, content=iter([*chunks, b" "]), headers=kind)
    assert late.status_code == 413
    assert late.json()["error"]["code"] == "request_too_large"


def test_metrics_count_what_was_done(hybrid):
    def read() -> dict[str, float]:
        text = httpx.get(f"{hybrid.server.url}/metrics").text
        rows = [line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#"]
        return {name.replace('model_name="tiny"', ""): float(value) for name, value in rows}

    before = read()
    used = hybrid.complete(n=2, temperature=0, prompt="word7 word8 word9 " * 4).usage
    wait_until(hybrid.is_free, "free memory")
    after = read()
    # Some are known from the first step of decoding on.
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    # Each of the n texts is a request, and reads the prompt.
    assert grown["pcomm:prompt_tokens_total{}"] == 2 * used.prompt_tokens
    assert grown["pcomm:generation_tokens_total{}"] == used.completion_tokens == 24
    assert grown['pcomm:request_success_total{finished_reason="length",}'] == 2
    assert grown["pcomm:time_to_first_token_seconds_count{}"] == 2
    assert grown["pcomm:inter_token_latency_seconds_count{}"] == 22
    assert grown["pcomm:e2e_request_latency_seconds_count{}"] == 2
    assert grown["pcomm:prefix_cache_queries_total{}"] == 2 * used.prompt_tokens
    step_s = after["pcomm:decode_step_seconds{}"]
    floor_s = after["pcomm:decode_floor_seconds{}"]
    moved = after["pcomm:decode_step_bytes{}"]
    assert floor_s == pytest.approx(moved / after["pcomm:memory_bandwidth_bytes_per_second{}"])
    assert after["pcomm:decode_floor_ratio{}"] == pytest.approx(floor_s / step_s)
    assert after['pcomm:host_phase_seconds{,phase="sample"}'] > 0
    assert after["pcomm:num_requests_running{}"] == after["pcomm:kv_cache_usage_perc{}"] == 0


def test_the_page_needs_nothing_from_elsewhere(hybrid):
    page = httpx.get(f"{hybrid.server.url}/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text
    assert "https://" not in page.text
    # Text of a model is never HTML.
    assert "innerHTML" not in page.text
    for path in ("v1/chat/completions", "v1/models", "metrics", "health"):
        assert f'fetch("{path}"' in page.text
        assert f"/{path}" in httpx.get(f"{hybrid.server.url}/openapi.json").json()["paths"]
