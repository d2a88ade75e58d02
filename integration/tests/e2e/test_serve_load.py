"""Many clients at once, and clients that leave, do not read, or come when there is no room."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from integration_support.short_runs import tiny_run
from pcomm.core.testing.programs import wait_until
from pcomm.inference import SamplingParams
from pcomm.integration.llm import LLM

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")
pytest.importorskip("uvicorn")

from integration_support.live_server import LiveServer  # noqa: E402
from pcomm.integration.serve.app import create_app  # noqa: E402
from pcomm.integration.serve.service import ServeSettings, Service  # noqa: E402


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("load"), "GA")


@pytest.fixture
def llm(run: Path) -> Iterator[LLM]:
    with LLM(run, memory_bytes=2**20, max_model_len=256, max_requests=8, max_queued=256) as found:
        yield found


def is_free(server: LiveServer) -> bool:
    stats = server.stats()
    used = (stats.running, stats.waiting, stats.blocks.used, stats.state_slots.used)
    return used == (0, 0, 0, 0) and server.served.service.streams.num_open == 0


def is_whole(server: LiveServer) -> bool:
    blocks, slots = server.stats().blocks, server.stats().state_slots
    return all(p.free + p.used + p.cached == p.size for p in (blocks, slots))


def never(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let steps do nothing until the event is set; the loop takes requests in between."""
    goes_on, step = threading.Event(), llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: step() if goes_on.wait(0.001) else [])
    return goes_on


def raw_request(server: LiveServer, **fields: Any) -> socket.socket:
    """A connection on which a completion was asked for."""
    body = json.dumps({"model": "tiny", "prompt": "word1", **fields}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    return connection


def test_two_hundred_streams_at_once_lose_nothing(llm):
    prompts = [f"word{place % 31} word{place % 7}" for place in range(200)]
    params = [
        SamplingParams(seed=place, max_tokens=4 + place % 9, ignore_eos=True)
        for place in range(200)
    ]
    expected = [one.text for one in llm.generate(prompts, params)]

    async def all_texts(url: str) -> list[str]:
        limits = httpx.Limits(max_connections=300)
        http = httpx.AsyncClient(limits=limits, timeout=600)
        options = {"base_url": f"{url}/v1", "api_key": "-", "max_retries": 0}
        async with openai.AsyncOpenAI(http_client=http, **options) as client:

            async def one(place: int) -> str:
                stream = await client.completions.create(
                    model="tiny",
                    prompt=prompts[place],
                    seed=place,
                    max_tokens=params[place].max_tokens,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_body={"ignore_eos": True},
                )
                text, usage = "", None
                async for part in stream:
                    text += "".join(choice.text for choice in part.choices)
                    usage = part.usage
                assert usage.completion_tokens == params[place].max_tokens
                return text

            return list(await asyncio.gather(*map(one, range(200))))

    with LiveServer(llm) as server:
        assert asyncio.run(all_texts(server.url)) == expected
        wait_until(lambda: is_free(server), "free memory")
        assert is_whole(server)


def test_a_soak_of_aborts_and_disconnects_ends_with_free_memory(llm):
    draw = random.Random(3)
    with LiveServer(llm) as server, httpx.Client(timeout=600) as http:
        url = f"{server.url}/v1/completions"
        for place in range(60):
            fields = {"model": "tiny", "prompt": "word1 " * draw.randint(1, 30)}
            fields |= {"n": draw.randint(1, 3), "max_tokens": draw.randint(1, 200)}
            kind = draw.randrange(3)
            if kind == 0:
                # Leaves before the answer.
                raw_request(server, **fields, stream=draw.random() < 0.5).close()
            elif kind == 1:
                # Reads a little of the stream.
                with http.stream("POST", url, json=fields | {"stream": True}) as answer:
                    lines = answer.iter_lines()
                    for _ in range(draw.randint(1, 5)):
                        next(lines, None)
            else:
                fields["max_tokens"] = 3
                assert http.post(url, json=fields).status_code == 200, place
        wait_until(lambda: is_free(server), "free memory")
        assert is_whole(server)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_memory_running_or_queued(llm, stream, monkeypatch):
    goes_on = never(llm, monkeypatch)
    with LiveServer(llm) as server:
        queued = [raw_request(server, stream=stream, n=5) for _ in range(4)]
        wait_until(lambda: server.stats().waiting == 20, "all requests in the queue")
        queued.pop().close()
        wait_until(lambda: server.stats().waiting == 15, "the queue without those of one")
        fields = {"stream": stream, "n": 5, "max_tokens": 250, "ignore_eos": True}
        queued += [raw_request(server, **fields) for _ in range(2)]
        wait_until(lambda: server.stats().waiting == 25, "those in the queue")
        goes_on.set()
        wait_until(lambda: server.stats().running > 0, "running requests")
        for connection in queued:
            connection.close()
        wait_until(lambda: is_free(server), "free memory")
        assert is_whole(server)


def test_a_full_queue_is_429_and_all_texts_of_a_request_come_or_none(run, monkeypatch):
    with LLM(run, memory_bytes=2**20, max_model_len=128, max_queued=5) as llm:
        goes_on = never(llm, monkeypatch)
        with LiveServer(llm) as server:
            options = {"base_url": f"{server.url}/v1", "api_key": "-", "max_retries": 0}
            with openai.OpenAI(**options) as client:
                waiting = [raw_request(server, n=2, max_tokens=2) for _ in range(2)]
                wait_until(lambda: server.stats().waiting == 4, "requests in the queue")
                for n in (6, 128):
                    # These would never find room, however long the client waits.
                    with pytest.raises(openai.BadRequestError, match="At most 5 texts"):
                        client.completions.create(model="tiny", prompt="a", n=n)
                for n in (2, 3, 5):
                    with pytest.raises(openai.RateLimitError) as caught:
                        client.completions.create(model="tiny", prompt="a", n=n)
                    assert int(caught.value.response.headers["retry-after"]) >= 1
                    assert caught.value.body["code"] == "queue_full"
                    # Of the two, one would have had room.
                    assert server.stats().waiting == 4
                goes_on.set()
                for connection in waiting:
                    assert connection.recv(15) == b"HTTP/1.1 200 OK"
                    connection.close()
                assert client.completions.create(model="tiny", prompt="a").choices[0].text
                wait_until(lambda: is_free(server), "free memory")


def test_an_api_key_guards_the_models_alone(llm):
    with LiveServer(llm, api_key="sesame") as server:
        url = server.url
        for header in ("", "sesame", "Basic sesame", "Bearer sesam", "Bearer sesame2", "Bearer ü"):
            headers = {"Authorization": header.encode()}
            answer = httpx.get(f"{url}/v1/models", headers=headers)
            assert answer.status_code == 401, header
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert httpx.post(f"{url}/v1/completions", content=b"{").status_code == 401
        for path in ("", "/health", "/metrics", "/openapi.json"):
            assert httpx.get(url + path).status_code == 200
        options = {"base_url": f"{url}/v1", "max_retries": 0}
        with openai.OpenAI(api_key="sesame", **options) as client:
            assert client.completions.create(model="tiny", prompt="a").choices
        wrong = openai.OpenAI(api_key="else", **options)
        with wrong as client, pytest.raises(openai.AuthenticationError):
            client.completions.create(model="tiny", prompt="a")


class AsgiCall:
    """One streamed completion, given to the application by hand; its client reads when told."""

    def __init__(self, app: Any, **fields: Any) -> None:
        fields = {"model": "tiny", "prompt": "word1", "stream": True, **fields}
        self._body: bytes | None = json.dumps(fields).encode()
        self.reads, self.leaves = asyncio.Event(), asyncio.Event()
        self.sent: list[bytes] = []
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message.get("body", b""))
        if len(self.sent) > 1:
            await self.reads.wait()


async def until(claim: Any) -> None:
    while not claim():
        await asyncio.sleep(0.001)


def test_a_client_that_does_not_read_delays_nobody_and_keeps_no_memory(llm):
    served = create_app(llm, ServeSettings(model_name="tiny", max_unread_tokens=20))
    service = served.service

    async def play() -> tuple[list[bytes], list[bytes]]:
        await service.start()
        try:
            stuck = AsgiCall(served.app, max_tokens=200, ignore_eos=True)
            await until(lambda: len(stuck.sent) > 1)
            reader = AsgiCall(served.app, max_tokens=50, ignore_eos=True)
            reader.reads.set()
            await reader.task
            # Given up long before its 200 tokens, while its client still sits there.
            await until(lambda: service.streams.num_open == 0)
            stats = await asyncio.wrap_future(service.loop.call(service.engine_stats))
            assert (stats.running, stats.blocks.used) == (0, 0)
            assert not stuck.task.done()
            stuck.reads.set()
            await stuck.task
            return stuck.sent, reader.sent
        finally:
            await service.stop()

    stuck, reader = asyncio.run(play())
    assert reader[-2:] == [b"data: [DONE]\n\n", b""]
    events = [json.loads(e[6:]) for e in b"".join(stuck).decode().split("\n\n") if e]
    assert "not read" in events[-1]["error"]["message"]
    assert len(events) < 100


def test_a_client_that_never_reads_is_given_up(llm):
    served = create_app(llm, ServeSettings(model_name="tiny", write_timeout_s=0.01))

    async def play() -> None:
        await served.service.start()
        try:
            # Ends though nothing is read and nobody leaves.
            await AsgiCall(served.app, max_tokens=3).task
            assert served.service.streams.num_open == 0
        finally:
            await served.service.stop()

    asyncio.run(play())


def test_health_watches_the_step_loop(llm, monkeypatch):
    now, is_stuck, goes_on, step = [0.0], threading.Event(), threading.Event(), llm.engine.step

    def slow() -> Any:
        is_stuck.set()
        goes_on.wait()
        return step()

    monkeypatch.setattr(llm.engine, "step", slow)
    settings = ServeSettings(model_name="tiny", step_limit_s=60)
    service = Service(llm, settings, clock=lambda: now[0])

    async def play() -> None:
        assert service.health() == (False, "the step loop does not run")
        await service.start()
        assert service.health() == (True, "ok")
        call = AsgiCall(_app_of(service), max_tokens=2)
        call.reads.set()
        await asyncio.to_thread(is_stuck.wait)
        now[0] = 60.0
        assert service.health() == (True, "ok")
        now[0] = 60.5
        assert service.health() == (False, "a step has not returned for 60 s")
        goes_on.set()
        await call.task
        # Idle for long is no reason to worry.
        now[0] = 1e6
        assert service.health() == (True, "ok")
        await service.stop()
        assert service.health() == (False, "the step loop does not run")

    asyncio.run(play())


def _app_of(service: Service) -> Any:
    """The route of completions alone, over a service of the test's own."""
    from fastapi import FastAPI, Request, Response

    from pcomm.integration.serve.request_bodies import CompletionRequest

    app = FastAPI()

    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.complete(body, request)

    # The annotations are strings of this file, and not of where FastAPI looks.
    completions.__annotations__ = {
        "body": CompletionRequest,
        "request": Request,
        "return": Response,
    }
    app.post("/v1/completions")(completions)
    return app


def test_a_step_that_raises_ends_all_with_an_error_and_the_server_says_so(llm, monkeypatch):
    goes_on = never(llm, monkeypatch)
    idle = llm.engine.step

    def broken() -> Any:
        if goes_on.is_set():
            raise RuntimeError("secret of another request")
        return idle()

    monkeypatch.setattr(llm.engine, "step", broken)
    with LiveServer(llm) as server, httpx.Client(timeout=600) as http:
        url = f"{server.url}/v1/completions"
        fields = {"model": "tiny", "prompt": "a", "stream": True}
        with ThreadPoolExecutor(2) as pool:
            asked = [{**fields, "stream": stream} for stream in (True, False)]
            waiting = [pool.submit(http.post, url, json=one) for one in asked]
            wait_until(lambda: server.stats().waiting == 2, "both requests")
            goes_on.set()
        streamed, whole = (one.result() for one in waiting)
        assert whole.status_code == 500
        # A step that had begun by then may have written something; the error is then an event.
        assert streamed.status_code == (200 if streamed.text.startswith("data: ") else 500)
        for answer in (streamed, whole):
            *_, last = answer.text.rstrip().split("\n\n")
            error = json.loads(last.removeprefix("data: "))["error"]
            assert (error["type"], error["code"]) == ("server_error", "internal_error")
            assert "secret" not in error["message"]
        health = http.get(f"{server.url}/health")
        assert (health.status_code, "RuntimeError" in health.text) == (503, True)
        assert http.post(url, json=fields).status_code == 503
        assert http.get(f"{server.url}/metrics").status_code == 200


def test_a_request_that_fails_leaves_the_others_alone(llm, monkeypatch, caplog):
    expected = llm.generate("word1", SamplingParams(temperature=0, max_tokens=6))[0].text
    step, poison = llm.loaded.model.step, llm.loaded.tokenizer.encode("Q")[0]

    def picky(batch: Any, memory: Any) -> Any:
        if (batch.tokens_T == poison).any():
            raise ValueError("cannot")
        return step(batch, memory)

    monkeypatch.setattr(llm.loaded.model, "step", picky)
    with LiveServer(llm) as server, httpx.Client(timeout=600) as http:
        url = f"{server.url}/v1/completions"
        good = {"model": "tiny", "prompt": "word1", "temperature": 0, "max_tokens": 6}
        found: list[Any] = [None] * 9

        def ask(place: int) -> None:
            fields = good | ({"prompt": "Q"} if place % 3 == 0 else {})
            found[place] = http.post(url, json=fields)

        threads = [threading.Thread(target=ask, args=(place,)) for place in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for place, answer in enumerate(found):
            if place % 3 == 0:
                assert answer.status_code == 500
                assert "cannot" not in answer.text
            else:
                assert answer.json()["choices"][0]["text"] == expected
        # The log has what the answers do not say: each request, and where it was raised.
        logged = [record for record in caplog.records if record.name == "pcomm.serve"]
        assert len({record.getMessage() for record in logged}) == 3
        assert all("cmpl-" in record.getMessage() for record in logged)
        assert all(record.levelname == "ERROR" for record in logged)
        assert caplog.text.count("in picky") == 3
        wait_until(lambda: is_free(server), "free memory")
        assert http.get(f"{server.url}/health").status_code == 200
