"""Grammars are compiled beside the steps: nobody waits for one but those who asked for it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration_support.short_runs import tiny_run
from pcomm.core.errors import ClosedError, ConfigError
from pcomm.core.testing.programs import wait_until
from pcomm.inference import SamplingParams
from pcomm.inference.engine import QueueFullError
from pcomm.inference.sampling import GrammarCompiler
from pcomm.integration.commands.conversion import run_to_directory
from pcomm.integration.llm import LLM

httpx = pytest.importorskip("httpx2")
pytest.importorskip("llguidance")
pytest.importorskip("uvicorn")

from integration_support.live_server import LiveServer  # noqa: E402
from pcomm.integration.serve.grammar_pool import GrammarPool  # noqa: E402


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("grammars"), "G")


@pytest.fixture
def llm(run: Path) -> Iterator[LLM]:
    with LLM(run, memory_bytes=2**20, max_model_len=256, max_requests=8) as found:
        yield found


class Slow:
    """Lets compilations wait until the test says so, and counts them."""

    def __init__(self, compiler: Any = None) -> None:
        self.begun: list[str] = []
        self.goes_on = threading.Event()
        self.done: dict[str, Any] = {}
        self._compiler = compiler

    def compile(self, params: SamplingParams) -> Any:
        text = params.json_schema or params.regex
        if text is None:
            return None
        self.begun.append(text)
        self.goes_on.wait()
        if "bad" in text:
            raise ConfigError("SamplingParams: regex", found="bad", why="-", fix="-")
        return self._compiler(params) if self._compiler else text

    def kept(self, params: SamplingParams) -> Any:
        return self.done.get(params.regex)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """All compilers of this process wait; those of engines, too."""
    whole = GrammarCompiler.compile
    compilers: list[GrammarCompiler] = []
    found = Slow(lambda params: whole(compilers[-1], params))

    def wait(self: GrammarCompiler, params: SamplingParams) -> Any:
        compilers.append(self)
        return found.compile(params)

    monkeypatch.setattr(GrammarCompiler, "compile", wait)
    yield found
    found.goes_on.set()


def chat(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": "word1"}]
    return {"model": "tiny", "messages": messages, "response_format": named, **fields}


def test_streams_get_their_tokens_while_a_grammar_is_compiled(llm, slow):
    with LiveServer(llm) as server, httpx.Client(timeout=60) as http:
        url, answers = f"{server.url}/v1", []

        def ask() -> None:
            fields = chat({"enum": ["one", "two"]}, n=2)
            answers.append(httpx.post(f"{url}/chat/completions", json=fields, timeout=600))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        # All three: one that comes when the others have their grammar would have it compiled again.
        grammars = server.served.service.grammars
        wait_until(lambda: grammars.num_waiting == 3 and slow.begun, "three that wait for it")
        fields = {"model": "tiny", "prompt": "a", "max_tokens": 20, "ignore_eos": True}
        with http.stream("POST", f"{url}/completions", json=fields | {"stream": True}) as stream:
            parts = [line for line in stream.iter_lines() if line]
        assert parts[-1] == "data: [DONE]"
        assert not answers
        assert server.stats().running == server.stats().waiting == 0
        slow.goes_on.set()
        for thread in threads:
            thread.join()
        texts = [
            json.loads(choice["message"]["content"])
            for answer in answers
            for choice in answer.json()["choices"]
        ]
        assert len(texts) == 6
        assert {*texts} <= {"one", "two"}
        # Of three equal ones one was compiled, and none in the thread of the steps.
        assert len(slow.begun) == 1
        wait_until(lambda: server.served.service.streams.num_open == 0, "an end of all")


def test_a_client_that_leaves_while_its_grammar_is_compiled_frees_everything(llm, slow):
    async def play(url: str, desk: GrammarPool) -> None:
        async with httpx.AsyncClient(timeout=600) as http:
            asked = [
                asyncio.ensure_future(http.post(url, json=chat({"const": number})))
                for number in range(5)
            ]
            # All five have arrived: one that the server reads later than its client leaves would
            # be a job for a moment, perhaps after the others have ended.
            await until(lambda: len(slow.begun) == 2 and desk.num_jobs == 5)
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    with LiveServer(llm) as server:
        desk = server.served.service.grammars
        asyncio.run(play(f"{server.url}/v1/chat/completions", desk))
        # The two that have begun cannot be stopped; the others never begin.
        wait_until(lambda: desk.num_jobs == 2, "an end of those that have not begun")
        assert server.stats().running == server.stats().waiting == 0
        slow.goes_on.set()
        wait_until(lambda: desk.num_jobs == 0, "an end of the others")
        assert len(slow.begun) == 2
        assert server.served.service.streams.num_open == 0


def desk(slow: Slow, **limits: Any) -> GrammarPool:
    options = {"max_compiling": 1, "max_waiting": 1, "limit_s": 600.0, **limits}
    return GrammarPool(slow, **options)  # type: ignore[arg-type]


def played(slow: Slow, play: Callable[[], Any]) -> Any:
    try:
        return asyncio.run(play())
    finally:
        slow.goes_on.set()


async def until(claim: Callable[[], bool]) -> None:
    while not claim():
        await asyncio.sleep(0.001)


def asked(desk: GrammarPool, text: str) -> asyncio.Task[Any]:
    return asyncio.ensure_future(desk.compile(SamplingParams(regex=text)))


def test_few_are_compiled_at_once_and_few_wait():
    slow = Slow()

    async def play() -> None:
        limited = desk(slow)
        one, two = asked(limited, "one"), asked(limited, "two")
        await until(lambda: slow.begun == ["one"])
        with pytest.raises(QueueFullError, match="2 grammars are compiled or wait"):
            await asked(limited, "three")
        # Those that are there already may be asked for all the same.
        again = asked(limited, "two")
        slow.goes_on.set()
        assert await asyncio.gather(one, two, again) == ["one", "two", "two"]
        assert slow.begun == ["one", "two"]
        assert limited.num_jobs == 0

    played(slow, play)


def test_an_error_is_one_of_those_who_asked_for_that_grammar():
    slow = Slow()
    slow.goes_on.set()

    async def play() -> list[Any]:
        limited = desk(slow, max_waiting=9)
        tasks = [asked(limited, text) for text in ("bad", "good", "bad")]
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, good, other = played(slow, play)
    assert isinstance(first, ConfigError)
    assert isinstance(other, ConfigError)
    assert good == "good"


def test_one_that_is_kept_is_there_at_once():
    slow = Slow()
    slow.done["kept"] = "kept"
    assert played(slow, lambda: desk(slow).compile(SamplingParams(regex="kept"))) == "kept"
    assert slow.begun == []


def test_one_that_takes_too_long_is_an_error_and_keeps_its_place():
    slow = Slow()

    async def play() -> None:
        limited = desk(slow, limit_s=0.01)
        with pytest.raises(ConfigError, match="not compiled after"):
            await asked(limited, "endless")
        with pytest.raises(QueueFullError, match="no grammar has begun"):
            await asked(limited, "next")
        # Whoever asks again joins the one under way.
        with pytest.raises(ConfigError, match="not compiled after"):
            await asked(limited, "endless")
        assert slow.begun == ["endless"]
        assert limited.num_jobs == 1

    played(slow, play)


def test_a_server_that_stops_tells_those_who_wait():
    slow = Slow()

    async def play() -> None:
        limited = desk(slow)
        waiting = [asked(limited, "one"), asked(limited, "two")]
        await until(lambda: slow.begun == ["one"])
        limited.fail_all(ClosedError("the request", found="-", why="-", fix="-"))
        for one in waiting:
            with pytest.raises(ClosedError):
                await one
        slow.goes_on.set()
        await until(lambda: limited.num_jobs == 0)
        assert slow.begun == ["one"]

    played(slow, play)


def test_each_text_begins_at_the_begin_of_a_shared_grammar(llm):
    from pcomm.inference import Request

    params = SamplingParams(regex="ab|ba", seed=1)
    grammar = GrammarCompiler(llm.loaded.tokenizer, llm.loaded.vocabulary).compile(params)
    for name in ("one", "two"):
        llm.engine.add(Request(name, (1, 2), params, grammar=grammar))
    texts = {"one": "", "two": ""}
    while llm.engine.has_work:
        for output in llm.engine.step():
            assert output.error is None
            texts[output.request_id] += output.text
    assert {*texts.values()} <= {"ab", "ba"}
    with pytest.raises(ConfigError, match="other settings"):
        llm.engine.add(Request("three", (1,), SamplingParams(regex="a"), grammar=grammar))


@pytest.mark.parametrize("decoder", ["its own", "none"])
def test_a_tokenizer_that_grammars_cannot_read_stops_no_server(decoder, tmp_path):
    """The library of grammars compiles not every expression that cuts words, nor all decoders."""
    run_to_directory(tiny_run(tmp_path, "A"), tmp_path / "exported")
    file = tmp_path / "exported" / "tokenizer.json"
    content = json.loads(file.read_text())
    assert any(one["type"] == "Split" for one in content["pre_tokenizer"]["pretokenizers"])
    if decoder == "none":
        file.write_text(json.dumps(content | {"decoder": None}))
    fields = {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": "word1"}]}
    named = {"name": "x", "schema": {"type": "integer", "minimum": 10, "maximum": 99}}
    schema = {"response_format": {"type": "json_schema", "json_schema": named}}
    with LLM(tmp_path / "exported", memory_bytes=2**20) as llm, LiveServer(llm) as server:
        url = f"{server.url}/v1/chat/completions"
        assert httpx.post(url, json=fields).status_code == 200
        answer = httpx.post(url, json=fields | schema)
        if decoder == "none":
            assert answer.status_code == 400
            assert "byte-level decoder" in answer.json()["error"]["message"]
        else:
            text = answer.json()["choices"][0]["message"]["content"]
            assert 10 <= int(text) <= 99
        assert httpx.post(url, json=fields).status_code == 200
