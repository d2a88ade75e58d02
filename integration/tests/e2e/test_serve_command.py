"""`pcomm serve` and `pcomm chat` as programs: their output, their signals and their ends."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from integration_support.short_runs import tiny_run
from pcomm.core.cli import main
from pcomm.core.errors import ConfigError, PeerError
from pcomm.core.testing.programs import PATIENCE_S, free_port, scaled_s, wait_until
from pcomm.inference import SamplingParams
from pcomm.integration.llm import LLM

httpx = pytest.importorskip("httpx2")
pytest.importorskip("uvicorn")

from pcomm.integration.serve.app import Served  # noqa: E402
from pcomm.integration.serve.server import bind, listen  # noqa: E402
from pcomm.integration.serve.service import ServeSettings, Service  # noqa: E402

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A state of fixed size, so that a text may be as long as a test wants; two ranks can share it.
    return tiny_run(tmp_path_factory.mktemp("command"), "M", "model.mamba_groups=2")


def begin_stream(url: str, **fields: Any) -> tuple[Any, Any]:
    """An open stream and its lines, of which the first has come."""
    body = {"model": "run", "prompt": "word1", "stream": True, "ignore_eos": True, **fields}
    context = httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600)
    lines = (line for line in context.__enter__().iter_lines() if line)
    next(lines)
    return context, lines


def url_from(process: subprocess.Popen[str]) -> str:
    """The address that the server has printed, of its API and of its page."""
    assert process.stdout is not None
    api = process.stdout.readline()
    page = process.stdout.readline()
    found = re.fullmatch(r'OpenAI API (http://127\.0\.0\.1:\d+)/v1, model "run"\n', api)
    assert found, api
    assert page == f"chat page  {found[1]}/\n"
    return found[1]


def said_afterwards(said: str) -> list[str]:
    """The lines on stderr behind those that say what was loaded, where, and how it is used."""
    loading, what, where, template, *rest = said.splitlines()
    assert re.fullmatch(r"loading /.*/run \.\.\.", loading)
    assert re.fullmatch(r"run: [\d,]+ parameters in float32, from /.*/run, step 2", what)
    assert re.fullmatch(
        r"on cpu, (1 process|2 processes); context of [\d,]+ tokens; [\d.]+ MiB for states", where
    )
    assert template.startswith("This model has no chat template")
    assert template.endswith("/run --prompt TEXT` asks for that.")
    return rest


def fields_of(line: str) -> dict[str, str]:
    """The fields of a line on a request."""
    return dict(pair.split("=", 1) for pair in line.split(" "))


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and log of a server that was told to end."""
    _, logged = process.communicate(timeout=scaled_s(PATIENCE_S))
    return process.returncode, logged


def test_sigterm_lets_requests_end_and_each_has_a_line_of_what_it_cost(run, start):
    """The exit code is 0, and nothing of a text is logged."""
    process = start("pcomm", "serve", run, "--port", 0, "--memory-mib", 4)
    url = url_from(process)
    fields = {"model": "run", "prompt": "word1 word2", "max_tokens": 5, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=fields).json()
    more = {"stream": True, "stream_options": {"include_usage": True}}
    parts = httpx.post(f"{url}/v1/completions?text=word3", json=fields | more).text.split("data: ")
    told = json.loads(parts[-2])
    httpx.get(f"{url}/nowhere%0Atime=now word4")
    httpx.post(f"{url}/v1/completions", json=fields | {"prompt": "word1", "word5": "word6"})
    httpx.get(f"{url}/health")
    context, lines = begin_stream(url, max_tokens=300)
    process.send_signal(signal.SIGTERM)
    *_, last, done = lines
    context.__exit__(None, None, None)
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert done == "data: [DONE]"
    code, logged = ended(process)
    assert code == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    # The log ends with what was written.
    usage, *logged_lines, speed = said_afterwards(logged)
    assert usage == "Ctrl-C ends the server."
    found = list(map(fields_of, logged_lines))
    names = ["method", "path", "status", "prompt_tokens", "completion_tokens", "request_id"]
    completions, prompt = "/v1/completions", str(answer["usage"]["prompt_tokens"])
    *known, drained = [[entry[name] for name in names] for entry in found]
    assert known == [
        ["POST", completions, "200", prompt, "5", answer["id"]],
        ["POST", completions, "200", prompt, "5", told["id"]],
        ["GET", "/nowhere%0Atime%3Dnow%20word4", "404", "-", "-", "-"],
        ["POST", completions, "400", "-", "-", "-"],
        ["GET", "/health", "200", "-", "-", "-"],
    ]
    assert [*drained[:3], drained[4]] == ["POST", completions, "200", "300"]
    assert speed == "310 tokens"
    assert all(float(entry["seconds"]) >= 0 for entry in found)
    assert "word" not in logged.replace("%20word4", "")


def test_what_does_not_end_in_time_is_told_so(run, capsys):
    port = free_port()

    def is_up() -> bool:
        with contextlib.suppress(httpx.ConnectError):
            return bool(httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200)
        return False

    def last_line() -> str:
        """What the client gets last; the signal comes in the middle of its text."""
        wait_until(is_up, "the server")
        try:
            context, lines = begin_stream(f"http://127.0.0.1:{port}", max_tokens=10**7)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
        *_, last = lines
        context.__exit__(None, None, None)
        return last.removeprefix("data: ")

    options = ["--max-model-len", "10000000", "--shutdown-s", "0.2", "--memory-mib", "4"]
    options += ["--no-access-log", "--stats"]
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(last_line)
        assert main(["serve", str(run), "--port", str(port), *options]) == 0
    assert json.loads(told.result())["error"]["code"] == "unavailable"
    # Without a log of requests, and with the line on speed.
    _, speed = said_afterwards(capsys.readouterr().err)
    assert re.match(r"\d+ tokens?; a decode step ", speed)


def test_a_server_that_drains_says_so_ends_what_it_has_and_takes_no_more(run, capsys):
    port = free_port()
    url, get = f"http://127.0.0.1:{port}", partial(httpx.get, timeout=600)

    def status(path: str) -> int:
        with contextlib.suppress(httpx.ConnectError):
            return int(get(f"{url}/{path}").status_code)
        return 0

    def play() -> None:
        wait_until(lambda: status("ready") == 200, "the server")
        try:
            context, lines = begin_stream(url, max_tokens=10**7)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: status("ready") == 503, "a server that drains")
        assert get(f"{url}/ready").json() == {"status": "draining"}
        assert status("health") == 200
        body = {"model": "run", "prompt": "word1", "max_tokens": 2}
        for path in ("completions", "chat/completions"):
            refused = httpx.post(f"{url}/v1/{path}", json=body, timeout=600)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "unavailable"
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["connection"] == "close"
        assert status("v1/models") == 200
        told = get(f"{url}/metrics").text
        for line in (
            'pcomm:ready{model_name="run"} 0.0',
            'pcomm:draining{model_name="run"} 1.0',
            'pcomm:requests_under_way{model_name="run"} 1.0',
            'pcomm:requests_refused_total{model_name="run",reason="draining"} 2.0',
            'pcomm:requests_refused_total{model_name="run",reason="failed"} 0.0',
        ):
            assert line in told.splitlines()
        # The one under way goes on; the server ends with it, long before its limit.
        for _ in range(20):
            assert "error" not in json.loads(next(lines).removeprefix("data: "))
        context.__exit__(None, None, None)

    options = ["--max-model-len", "10000000", "--shutdown-s", "1000000", "--memory-mib", "4"]
    with ThreadPoolExecutor(1) as pool:
        played = pool.submit(play)
        assert main(["serve", str(run), "--port", str(port), *options]) == 0
        played.result()
    # A client that leaves has cost what was written until then.
    _, *lines, _ = said_afterwards(capsys.readouterr().err)
    found = [one for one in map(fields_of, lines) if "completions" in one["path"]]
    [left] = [one["completion_tokens"] for one in found if one["status"] == "200"]
    assert 20 <= int(left) < 10**7


def test_a_killed_server_leaves_no_process(run, start, started):
    process = start("pcomm", "serve", run, "--port", 0, "--memory-mib", 4, "--ranks", 2)
    # Both ranks compute.
    context, _ = begin_stream(url_from(process), max_tokens=2000)
    assert len(started.running()) >= 3
    os.kill(process.pid, signal.SIGKILL)
    with contextlib.suppress(httpx.HTTPError):
        context.__exit__(None, None, None)
    process.wait()
    wait_until(lambda: not started.running(), "the end of all that it had started")


def test_a_model_that_cannot_be_asked_is_served_until_health_says_so(run, monkeypatch):
    def failed() -> None:
        raise PeerError("stats", found="a rank that died", why="It is gone.", fix="Start again.")

    async def started(service: Service) -> tuple[bool, str]:
        await service.start()
        try:
            return service.health()
        finally:
            await service.stop()

    with LLM(run, memory_bytes=2**22) as llm:
        monkeypatch.setattr(llm, "stats", failed)
        assert asyncio.run(started(Service(llm, ServeSettings(model_name="run")))) == (True, "ok")


@pytest.mark.parametrize(("is_lost", "code"), [(False, 0), (True, 75)])
def test_the_exit_code_tells_that_the_model_had_failed(is_lost, code, run, monkeypatch, capsys):
    error = PeerError("step", found="a rank that died", why="It is gone.", fix="Start again.")

    def stopped(served: Served, bound: socket.socket, **options: object) -> None:
        if is_lost:
            served.service.loop.error = error

    monkeypatch.setattr("pcomm.integration.serve.server.serve", stopped)
    assert main(["serve", str(run), "--port", "0", "--memory-mib", "4"]) == code
    said = capsys.readouterr().err
    assert ("pcomm serve: the model has failed: a rank that died" in said) == is_lost


def test_two_servers_that_start_together_do_not_share_a_port():
    first = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    # Neither listens yet, which is when the system lets both have the address.
    second = bind("127.0.0.1", port)
    with first, second:
        assert listen(first) == f"http://127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=str(port)):
            listen(second)


def test_an_address_in_use_is_found_before_the_model_is_read(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        # The model cannot be read, which would be an error, too.
        (tmp_path / "config.json").write_text("{}")
        assert main(["serve", str(tmp_path), "--port", port]) == 2
    assert f"127.0.0.1 port {port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "70000"], "port 70000"),
        (["--host", "256.1.1.1"], "256.1.1.1"),
        (["--api-key-file", "/nowhere/key"], "--api-key-file"),
        (["--api-key-file", "/dev/null"], "empty first line"),
        (["--api-key-file", "KEY"], "outside printable ASCII"),
        (["--shutdown-s", "nan"], "shutdown_s"),
        (["--tool-format", "hermse"], "hermes"),
        (["--default-chat-template-kwargs", "{"], "no JSON"),
        (["--default-chat-template-kwargs", "[]"], "a JSON object"),
        (["--default-chat-template-kwargs", '{"tools": []}'], "tools"),
        (["--port", "0", "--dtype", "int3"], "'int3'"),
        (["--port", "0", "--max-model-len", "-1"], "max_model_len"),
    ],
)
def test_options_that_cannot_be_used(run, words, message, tmp_path, capsys):
    key = tmp_path / "key"
    key.write_text("schlüssel\n", encoding="utf-8")
    words = [str(key) if word == "KEY" else word for word in words]
    assert main(["serve", str(run), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_chat_answers_each_line_of_a_pipe_with_all_before_it_in_mind(
    ranks, run, monkeypatch, capsys
):
    monkeypatch.setattr("sys.stdin", io.StringIO("word1\n\nword2 word3"))
    words = ["--system", "short", "--max-tokens", "6", "--temperature", "0", "--memory-mib", "4"]
    assert main(["chat", str(run), "--ranks", ranks, *words]) == 0
    params = SamplingParams(max_tokens=6, temperature=0)
    messages: list[dict[str, object]] = [{"role": "system", "content": "short"}]
    expected = ""
    with LLM(run, memory_bytes=2**22) as llm:
        for question in ("word1", "word2 word3"):
            messages.append({"role": "user", "content": question})
            answer = llm.chat(messages, params).text
            messages.append({"role": "assistant", "content": answer})
            expected += answer + "\n"
    printed = capsys.readouterr()
    assert printed.out == expected
    (speed,) = said_afterwards(printed.err)
    assert re.fullmatch(r"12 tokens, [\d.]+ tokens/s", speed)


def test_a_message_that_cannot_be_answered_is_left_out_of_a_piped_chat(run, monkeypatch, capsys):
    options = ["--max-tokens", "4", "--temperature", "0", "--memory-mib", "4"]
    words = ["chat", str(run), "--max-model-len", "64", *options]

    def talk(text: bytes) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
        code = main(words)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    code, expected, said = talk(b"word1\nword2\n")
    assert (code, len(said_afterwards(said))) == (0, 1)
    code, found, said = talk(b"word1\n" + b"word " * 100 + b"\nword \xff\xfe\nword2\n")
    assert (code, found) == (2, expected)
    assert "max_model_len is 64" in said
    assert "no UTF-8" in said
    assert said.count("This message is left out") == 2


def test_a_conversation_that_has_outgrown_the_model_says_so_and_a_new_one_goes_on(
    run, monkeypatch, capsys
):
    options = ["--system", "short", "--max-tokens", "30", "--temperature", "0"]
    words = ["chat", str(run), "--max-model-len", "120", "--memory-mib", "4", *options]

    def talk(*lines: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        code = main(words)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    code, once, said = talk("word1")
    # The last line is that of the speed.
    assert (code, len(said_afterwards(said))) == (0, 1)
    # The second answer has no room left for its 30 tokens, the third message none at all.
    code, found, said = talk("word1", "word1", "word1", "/new ", "word1")
    assert code == 2
    assert found.startswith(once)
    assert found.endswith(once)
    assert "has 120 tokens, the most of this model, and the answer is cut off" in said
    assert "tokens with this message; the model reads 119" in said
    assert said.count("Type /new") == 2
    # A message that no conversation has room for is another matter.
    code, found, said = talk("word1", "word " * 300)
    assert (code, found) == (2, once)
    assert "Type /new" not in said


def test_words_of_a_chat_are_no_messages_and_unknown_ones_are_refused(run, monkeypatch, capsys):
    options = ["--max-tokens", "4", "--temperature", "0", "--memory-mib", "4"]

    def talk(*lines: str) -> tuple[int, str, list[str]]:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
        code = main(["chat", str(run), *options])
        printed = capsys.readouterr()
        return code, printed.out, said_afterwards(printed.err)

    code, expected, _ = talk("word1", " /hlep", "/etc/hosts")
    assert code == 0
    words = ("word1", "/help", "/hlep me", "/exit now", " /hlep", "/etc/hosts")
    for leave in ("/quit", "/bye", "/exit"):
        code, found, said = talk(*words, leave, "word2")
        # As if the words had not been there, and nothing is read behind the last one.
        assert (code, found) == (2, expected)
    new, help_, leave, unknown, not_alone, _ = said
    assert [line.split()[0] for line in (new, help_, leave)] == ["/new", "/help", "/exit"]
    assert unknown.startswith("/hlep: no such word. There are /new, /help, /exit;")
    assert not_alone.startswith("/exit: it stands alone on its line.")


@pytest.mark.parametrize(
    "leave",
    [
        pytest.param(b"\x04", id="Ctrl-D"),
        pytest.param(b"/exit\n", id="/exit", marks=pytest.mark.soak),
    ],
)
def test_a_chat_at_a_terminal_says_how_it_is_used_and_left(leave, run, fork):
    ours, theirs = os.openpty()
    options = ["--max-tokens", "3", "--memory-mib", "4"]
    process = fork("chat", run, *options, stdin=theirs, stdout=theirs)
    os.close(theirs)
    told = iter(process.stderr.readline, "")
    assert any("/help lists what else there is, Ctrl-D leaves" in line for line in told)
    os.write(ours, b"word1\n")
    # Ctrl-D means the end only where it is typed at the beginning of a line that is waited for.
    shown = b""
    while shown.count(b"> ") < 2:
        shown += os.read(ours, 1024)
    os.write(ours, leave)
    _, said = process.communicate(timeout=scaled_s(PATIENCE_S))
    os.close(ours)
    assert process.returncode == 0
    assert re.search(r"\b3 tokens, [\d.]+ tokens/s\n\Z", said)
