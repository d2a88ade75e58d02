"""The page of several servers behind nginx, as it is written: a rolling restart loses nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from integration_support.short_runs import tiny_run
from pcomm.core.testing.programs import PATIENCE_S, Programs, free_port, scaled_s, wait_until
from pcomm.inference import SamplingParams
from pcomm.integration.llm import LLM

httpx = pytest.importorskip("httpx2")
pytest.importorskip("uvicorn")

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "serve-behind-a-load-balancer.md"
TOKENS = 24
PROMPTS = [f"word{place} word{place % 3}" for place in range(4)]


def block(language: str) -> str:
    (found,) = re.findall(
        rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    return str(found)


def start_nginx(started: Programs, folder: Path, ports: dict[int, int]) -> None:
    """Debian's nginx with the file of the page, on ports of this test."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("no nginx on the path: `apt-get install nginx-light`")
    text = block("nginx")
    for named, port in ports.items():
        assert f"127.0.0.1:{named}" in text
        text = text.replace(f"127.0.0.1:{named}", f"127.0.0.1:{port}")
    (folder / "pcomm.conf").write_text(text)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        # One process: a worker has none of the variables by which what is left over is found.
        f"{user} daemon off; master_process off; pid {folder}/pid; error_log {folder}/log;\n"
        f"events {{}}\nhttp {{ access_log off; {paths} include {folder}/pcomm.conf; }}\n"
    )
    started.start(program, "-p", folder, "-c", folder / "nginx.conf", "-e", folder / "log")


def metric(port: int, name: str) -> float:
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=600).text
    (line,) = [one for one in text.splitlines() if one.startswith(f"pcomm:{name}{{")]
    return float(line.rpartition(" ")[2])


def is_ready(port: int) -> bool:
    try:
        return bool(httpx.get(f"http://127.0.0.1:{port}/ready", timeout=600).status_code == 200)
    except httpx.TransportError:
        return False


def ask(url: str, place: int, texts: list[str], ends: threading.Event) -> tuple[int, int]:
    """Ask for one text again and again, in turn as a stream; how often, and in how many parts."""
    num_asked = num_parts = 0
    body = {"model": "run", "prompt": PROMPTS[place], "max_tokens": TOKENS, "temperature": 0}
    with httpx.Client(timeout=600) as http:
        while not ends.is_set():
            is_stream = num_asked % 2 == place % 2
            fields = {**body, "ignore_eos": True, "stream": is_stream}
            with http.stream("POST", f"{url}/v1/completions", json=fields) as answer:
                parts = [part.decode() for part in answer.iter_raw()]
            text = "".join(parts)
            assert answer.status_code == 200, text
            if is_stream:
                *events, done = text.rstrip().split("\n\n")
                assert done == "data: [DONE]"
                found = [json.loads(event.removeprefix("data: ")) for event in events]
                assert len({part["id"] for part in found}) == 1
                num_parts = max(num_parts, len(parts))
            else:
                found = [json.loads(text)]
            assert "".join(part["choices"][0]["text"] for part in found) == texts[place]
            num_asked += 1
    return num_asked, num_parts


@pytest.mark.soak
def test_a_server_restarts_while_clients_send_and_no_request_is_lost(
    tmp_path: Path, start: Callable[..., Popen[str]], started: Programs
) -> None:
    ports = {named: free_port() for named in (8000, 8001, 8002)}
    start_nginx(started, tmp_path, ports)
    run = tiny_run(tmp_path, "M")
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(run, memory_bytes=2**22) as llm:
        texts = [one.text for one in llm.generate(PROMPTS, params)]

    def serve(named: int) -> Popen[str]:
        words = ("--port", ports[named], "--memory-mib", 4, "--no-access-log")
        return start("pcomm", "serve", run, *words)

    servers: dict[int, Any] = {named: serve(named) for named in (8001, 8002)}
    for named in servers:
        wait_until(lambda port=ports[named]: is_ready(port), "a server")
    url, ends = f"http://127.0.0.1:{ports[8000]}", threading.Event()
    # What a balancer that probes, and Prometheus, are given on the page.
    assert re.findall(r"127\.0\.0\.1:(\d+)", block("yaml")) == ["8001", "8002"]
    assert "curl -fsS http://127.0.0.1:$port/ready" in block("text")
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        clients = [pool.submit(ask, url, place, texts, ends) for place in range(len(PROMPTS))]
        try:
            busy = "generation_tokens_total"
            for named in servers:
                wait_until(lambda port=ports[named]: metric(port, busy) > 0, "both at work")
            servers[8001].send_signal(signal.SIGTERM)
            servers[8001].communicate(timeout=scaled_s(PATIENCE_S))
            assert servers[8001].returncode == 0
            before = metric(ports[8002], busy)
            servers[8001] = serve(8001)
            wait_until(lambda: is_ready(ports[8001]), "the server that was stopped")
            wait_until(lambda: metric(ports[8001], busy) > TOKENS, "its first texts")
            assert metric(ports[8002], busy) > before
            assert not any(client.done() for client in clients)
        finally:
            ends.set()
        found = [client.result() for client in clients]
    # Streams came in parts, as they were written.
    assert min(num_asked for num_asked, _ in found) > 1
    assert max(num_parts for _, num_parts in found) > TOKENS // 4
    for server in servers.values():
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=scaled_s(PATIENCE_S))
        assert server.returncode == 0
