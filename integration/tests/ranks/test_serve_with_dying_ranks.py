"""A server whose ranks are killed: what its clients get, how it goes on, and how it ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from integration_support.short_runs import tiny_run
from pcomm.core.cli import main
from pcomm.core.errors import PeerError
from pcomm.core.process import RankSession
from pcomm.core.testing.assertions import Living
from pcomm.core.testing.programs import free_port, wait_until
from pcomm.integration.llm import LLM

httpx = pytest.importorskip("httpx2")
pytest.importorskip("uvicorn")

from integration_support.live_server import LiveServer  # noqa: E402

# On a busy machine an answer may take long. To read the certificates of the system, which plain
# HTTP does not need, would take longer than most requests.
HTTP: dict[str, Any] = {"timeout": 600, "verify": False}
get, post = partial(httpx.get, **HTTP), partial(httpx.post, **HTTP)

OPTIONS: dict[str, Any] = {"ranks": 2, "memory_bytes": 2**22, "max_batch_tokens": 8}
BODY = {"model": "tiny", "prompt": "word1", "temperature": 0, "ignore_eos": True, "max_tokens": 8}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("dying"), "GA", "model.kv_heads=2")


# Ranks that were there before a test, such as those that wait for other files' tests.
OTHERS: set[int | None] = set()


@pytest.fixture(autouse=True)
def others() -> None:
    OTHERS.clear()
    OTHERS.update(one.pid for one in multiprocessing.active_children())


def rank_pids() -> list[int]:
    """The ranks of this test that are alive, in the order of their numbers."""
    found = [one for one in multiprocessing.active_children() if one.name.startswith("rank ")]
    found = [one for one in found if one.pid not in OTHERS]
    return [one.pid for one in sorted(found, key=lambda one: one.name) if one.pid]


def told_by(answer: Any) -> list[Any]:
    """The events of a stream, or the one body."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        parts = answer.text.split("\n\n")
        assert parts.pop() == ""
        assert all(part.startswith("data: ") for part in parts)
        return [part.removeprefix("data: ") for part in parts]
    return [answer.text]


def is_error(text: str) -> bool:
    """Whether it is an error as the OpenAI API has them, of a server that cannot serve now."""
    error = {} if text == "[DONE]" else json.loads(text).get("error")
    if not error:
        return False
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["code"], error["param"]) == ("server_error", "unavailable", None)
    return True


def metric(url: str, name: str) -> float | None:
    for line in get(f"{url}/metrics").text.splitlines():
        if line.startswith(f"pcomm:{name}{{"):
            return float(line.rpartition(" ")[2])
    return None


def is_ready(url: str) -> bool:
    return bool(get(f"{url}/ready").status_code == 200)


def kill_before(llm: LLM, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill rank 1 right before the engine's `step`th step from now."""
    plain, left = llm.engine.step, [step]

    def stepped() -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(rank_pids()[1], signal.SIGKILL)
        return plain()

    monkeypatch.setattr(llm.engine, "step", stepped)


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.soak), True])
def test_no_request_ends_silently_and_the_ranks_come_back_as_often_as_they_may(
    stream, run, monkeypatch, caplog
):
    with (
        LLM(run, max_model_len=256, **OPTIONS) as llm,
        LiveServer(llm, restarts=2, restart_pause_s=0.01) as server,
    ):
        url = server.url
        long = {**BODY, "max_tokens": 40}
        expected = post(f"{url}/v1/completions", json=long).json()["choices"][0]["text"]
        # Ten chunks of a prompt are read in ten steps; the third is none of a token.
        for step, prompt in ((3, "word1 " * 39), (25, "word1")):
            body = {**long, "prompt": prompt, "stream": stream}
            kill_before(llm, step, monkeypatch)
            answer = post(f"{url}/v1/completions", json=body)
            monkeypatch.undo()
            *before, last = told_by(answer)
            assert is_error(last)
            if stream and step == 25:
                # Its status was sent with the first token; what was written then has come.
                assert answer.status_code == 200
                parts = [json.loads(part)["choices"][0]["text"] for part in before]
                assert 0 < len("".join(parts)) < len(expected)
                assert expected.startswith("".join(parts))
            else:
                # Nothing was sent, so a proxy may ask another server.
                assert (answer.status_code, before) == (503, [])
                assert int(answer.headers["retry-after"]) >= 1
            wait_until(lambda: is_ready(url), "new ranks")
            assert server.served.service.health() == (True, "ok")
            # What the engine counts begins anew, and so does its cache; the server goes on.
            assert metric(url, "engine_steps_total") == 0
            assert metric(url, "prefix_cache_queries_total") == 0
            assert metric(url, "num_requests_running") == 0
            assert metric(url, "generation_tokens_total") >= 40
            again = post(f"{url}/v1/completions", json=long).json()["choices"][0]["text"]
            assert again == expected
        assert metric(url, "rank_restarts_total") == 2
        # An idle server finds it without a request. No restart is left.
        os.kill(rank_pids()[0], signal.SIGKILL)
        wait_until(lambda: server.served.service.loop.is_lost, "the end of the model")
        for path in ("health", "ready"):
            answer = get(f"{url}/{path}")
            assert answer.status_code == 503
            assert answer.json()["status"].startswith("rank 0 of 2 died")
        refused = post(f"{url}/v1/completions", json=body)
        assert refused.status_code == 503
        assert is_error(refused.text)
        assert int(refused.headers["retry-after"]) >= 1
        # Nothing is said of an engine that is not there.
        assert metric(url, "num_requests_running") is None
        assert (metric(url, "ready"), metric(url, "rank_restarts_total")) == (0, 2)
        assert get(f"{url}/v1/models").status_code == 200
    assert "restart 1 of 2" in caplog.text


def test_ranks_that_die_while_they_load_cost_a_restart_and_a_server_that_is_stopped_then_ends(
    run, monkeypatch
):
    plain, killed = RankSession.answers, list[int]()
    loads, goes_on = threading.Event(), threading.Event()

    def answers(self: RankSession, timeout_s: float | None = None) -> Any:
        # Before the first answer ranks load.
        if self.num_sent == 0 and len(killed) < 2:
            killed.append(rank_pids()[len(killed)])
            os.kill(killed[-1], signal.SIGKILL)
        elif self.num_sent == 0:
            loads.set()
            goes_on.wait()
        return plain(self, timeout_s)

    with (
        LLM(run, max_model_len=256, **OPTIONS) as llm,
        LiveServer(llm, restarts=4, restart_pause_s=0.01) as server,
    ):
        monkeypatch.setattr(RankSession, "answers", answers)
        os.kill(rank_pids()[1], signal.SIGKILL)
        wait_until(loads.is_set, "the third restart")
        assert len(killed) == 2
        status = get(f"{server.url}/health")
        assert status.status_code == 503
        assert status.json()["status"].endswith("; restart 3 of 4")
        # The server is stopped while its ranks load: they end, and it does not wait for them.
        stops = threading.Timer(0.2, goes_on.set)
        stops.start()
    stops.join()
    assert not server.served.service.loop.is_lost
    wait_until(lambda: rank_pids() == [], "the end of the ranks")


def test_a_model_whose_rank_dies_at_the_start_is_an_exit_code_for_a_supervisor(
    run, monkeypatch, capsys
):
    def answers(self: RankSession, timeout_s: float | None = None) -> Any:
        raise PeerError("LLM", found="rank 1 of 2 died", why="It is gone.", fix="Start again.")

    monkeypatch.setattr(RankSession, "answers", answers)
    assert main(["serve", str(run), "--ranks", "2", "--port", "0"]) == os.EX_TEMPFAIL
    assert "rank 1 of 2 died" in capsys.readouterr().err
    assert rank_pids() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--restart", "1"], "Give --ranks N as well"),
        (["--restart", "-1", "--ranks", "2"], "restarts"),
    ],
)
def test_restarts_that_cannot_be(words, message, run, capsys):
    assert main(["serve", str(run), *words]) == 2
    assert message in capsys.readouterr().err


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "pcomm", "psm_"))}


def left_since(before: Living) -> list[str]:
    """Threads that are new, but for those that the event loop keeps for its work."""
    return [one for one in Living.now().beyond(before) if "'asyncio_" not in one]


def ask(url: str, draw: random.Random, ends: threading.Event, answered: threading.Event) -> None:
    """Ask until the end; each request ends with a text, which it tells, or with an error."""
    with httpx.Client(**HTTP) as http:
        while not ends.is_set():
            fields = {"stream": draw.random() < 0.6, "prompt": "word1 " * draw.randint(1, 30)}
            fields |= {"max_tokens": draw.randint(1, 60), "n": draw.randint(1, 2)}
            answer = http.post(f"{url}/v1/completions", json={**BODY, **fields})
            *_, last = told_by(answer)
            if last == "[DONE]" or (answer.status_code == 200 and "choices" in last):
                answered.set()
            else:
                assert is_error(last), last
                assert answer.status_code in (200, 503)
                ends.wait(0.1)


@pytest.mark.parametrize(
    ("kills", "seed"), [(2, 0), *(pytest.param(50, n, marks=pytest.mark.soak) for n in range(4))]
)
def test_kills_at_random_moments_under_eight_clients_leave_nothing_behind(kills, seed, run):
    """The long form makes 200 kills: 50 from each of four seeds."""
    draw, ends, answered = random.Random(seed), threading.Event(), threading.Event()
    with (
        LLM(run, max_model_len=256, **OPTIONS) as llm,
        LiveServer(llm, restarts=kills, restart_pause_s=1e-8) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        url, loop = server.url, server.served.service.loop
        expected = post(f"{url}/v1/completions", json=BODY).json()["choices"][0]["text"]
        before, counts = Living.now(), (len(os.listdir("/proc/self/fd")), shared_memory())
        clients = [
            pool.submit(ask, url, random.Random(8 * seed + place), ends, answered)
            for place in range(8)
        ]
        try:
            for number in range(kills):
                # Now and then the ranks are still loading.
                if draw.random() < 0.8:
                    wait_until(lambda: loop.is_alive, "new ranks")
                ends.wait(draw.random() * 0.5)
                wait_until(rank_pids, "a rank")
                os.kill(draw.choice(rank_pids()), signal.SIGKILL)
                wait_until(lambda n=number: loop.num_restarts > n, "a restart")
            wait_until(lambda: loop.is_alive and not llm.failure, "the last ranks")
            answered.clear()
            wait_until(answered.is_set, "a text from the last ranks")
        finally:
            ends.set()
        for client in clients:
            client.result()
        assert loop.num_restarts == kills
        again = post(f"{url}/v1/completions", json=BODY).json()["choices"][0]["text"]
        assert again == expected
        stats = server.stats()
        used = (stats.running, stats.waiting, stats.blocks.used, stats.state_slots.used)
        assert used == (0, 0, 0, 0)
        assert server.served.service.streams.num_open == server.served.service.under_way == 0
        assert len(rank_pids()) == 2
        pool.shutdown()
        wait_until(lambda: not left_since(before), "the ends of threads")
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= counts[0], "closed files")
        assert shared_memory() <= counts[1]


@pytest.fixture
def ended(run: Path) -> Iterator[None]:
    """Nothing that a server has started is there after the test."""
    yield
    wait_until(lambda: rank_pids() == [], "the end of the ranks")


@pytest.mark.usefixtures("ended")
def test_the_command_goes_on_and_then_ends_with_the_code_for_its_supervisor(run, capsys):
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def status(path: str) -> int:
        try:
            return int(get(f"{url}/{path}").status_code)
        except httpx.HTTPError:
            return 0

    def client() -> list[str]:
        lasts = []
        for _ in range(2):
            wait_until(lambda: status("ready") == 200, "the server")
            body = {**BODY, "model": "run", "stream": True, "max_tokens": 10**5}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, **HTTP) as answer:
                lines = (line for line in answer.iter_lines() if line)
                next(lines)
                os.kill(rank_pids()[1], signal.SIGKILL)
                *_, last = lines
            lasts.append(last.removeprefix("data: "))
        return lasts

    words = ["--ranks", "2", "--restart", "1", "--port", str(port), "--memory-mib", "64"]
    words += ["--max-model-len", "200000", "--no-access-log"]
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(client)
        # Nobody asks it to end.
        assert main(["serve", str(run), *words]) == os.EX_TEMPFAIL == 75
        assert [is_error(last) for last in told.result()] == [True, True]
    said = capsys.readouterr().err
    assert "pcomm serve: the model has failed: rank 1 of 2 died: killed by SIGKILL\n" in said
    # Nothing listens there any more.
    with socket.create_server(("127.0.0.1", port)):
        pass
