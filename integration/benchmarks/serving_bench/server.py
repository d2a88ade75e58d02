"""Streams over HTTP beside the same engine without it."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pcomm.core.cli import what_to_install
from pcomm.core.errors import UnsupportedError
from pcomm.inference import Request, SamplingParams
from pcomm.integration.llm import LLM
from serving_bench import stream_client
from serving_bench.results import PartResults
from serving_bench.settings import Settings
from serving_bench.sides import num_threads, random_tokens, take_turns

_PROMPT = 32
_MEMORY_MIB = 512
_UNIT = "ms between tokens of a stream"
_COMMAND = "from pcomm.core.cli import main; raise SystemExit(main())"


def check_server() -> None:
    """Find out before anything is measured.

    Raises:
        UnsupportedError: A package that the server stands on is not installed.
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if find_spec(package) is None:
            raise UnsupportedError(
                "pcomm bench serving",
                found=f"{package} is not installed",
                why="The part `server` starts `pcomm serve`, which stands on it.",
                fix="In a checkout run `python3 -m pip install "
                f"{what_to_install('pcomm-integration', 'serve')}`, or leave the part out.",
            )


def measure_server(settings: Settings, directory: Path) -> PartResults:
    """Time between the tokens of a stream, over HTTP and without, in turns. Local.

    The server is `pcomm serve` in a process of its own with one thread of torch, the client another
    process (`stream_client`), which parses nothing while streams run. Without HTTP the same engine
    runs in this process with one thread, text included. While one side has its turn the other
    waits.

    Args:
        settings: Numbers of streams and tokens.
        directory: The model.
    """
    found, count = PartResults("server"), settings.server_streams
    generator = torch.Generator().manual_seed(0)
    longest = _PROMPT + settings.server_tokens
    counted: list[float] = []
    with (
        num_threads(1),
        LLM(directory, max_model_len=longest, memory_bytes=_MEMORY_MIB * 2**20) as llm,
        _served(directory, longest) as (host, port),
    ):

        def prompts() -> list[list[int]]:
            return [random_tokens(_PROMPT, llm.loaded.vocabulary, generator) for _ in range(count)]

        def without() -> Mapping[str, float]:
            return {"engine alone": _engine_us(llm, prompts(), settings.server_tokens)}

        def over_http() -> Mapping[str, float]:
            streams = _client(host, port, directory.name, prompts(), settings.server_tokens)
            counted.extend(one["tokens"] for one in streams)
            return {
                "over HTTP": statistics.median(
                    one["seconds"] * 1e6 / (one["tokens"] - 1) for one in streams
                )
            }

        times = take_turns([without, over_http], settings.rounds)
    place = f"{settings.models.gpt.name}, streams {count}"
    alone, http = times["engine alone"], times["over HTTP"]
    beside = (f"engine alone @ {place}", alone)
    found.time(f"engine alone @ {place}", alone, _UNIT)
    found.time(f"over HTTP @ {place}", http, _UNIT, beside=beside)
    more_ms = http.more_than(alone) / 1e3
    rounds = len(http.rounds_us)
    found.value(f"over HTTP, more @ {place}", more_ms, _UNIT, rounds)
    found.value(f"over HTTP, more @ {place}", more_ms / count, "ms of a streamed token", rounds)
    lost = len(counted) * settings.server_tokens - sum(counted)
    found.value(f"over HTTP @ {place}", lost, f"tokens lost of {len(counted)} streams", rounds)
    found.at_most(f"ms that HTTP adds between tokens of {count} streams", 1.0, more_ms)
    return found


def _engine_us(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Microseconds between the tokens of the median text."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for place, prompt in enumerate(prompts):
        llm.engine.add(Request(str(place), tuple(prompt), params))
    while llm.engine.has_work:
        outputs, now = llm.engine.step(), time.perf_counter()
        for output in outputs:
            first.setdefault(output.request_id, now)
            last[output.request_id] = now
    return statistics.median((last[name] - first[name]) * 1e6 for name in first) / (num_tokens - 1)


@contextmanager
def _served(directory: Path, longest: int) -> Iterator[tuple[str, int]]:
    """Host and port of `pcomm serve` on this machine, while the context is open."""
    words = ["serve", str(directory), "--port", "0", "--memory-mib", str(_MEMORY_MIB)]
    words += ["--max-model-len", str(longest), "--shutdown-s", "1"]
    command = [sys.executable, "-c", _COMMAND, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = re.search(r"http://([\d.]+):(\d+)", line)
            if address is None:
                raise RuntimeError(f"pcomm serve has ended with {process.wait()}: {line}")
            yield address[1], int(address[2])
        finally:
            process.terminate()


def _client(
    host: str, port: int, model: str, prompts: list[list[int]], num_tokens: int
) -> list[dict[str, float]]:
    """What the client's process says of each stream."""
    fields = {
        "model": model,
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    bodies = [{**fields, "prompt": prompt} for prompt in prompts]
    done = subprocess.run(
        [sys.executable, stream_client.__file__],
        input=json.dumps({"host": host, "port": port, "bodies": bodies}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the client of the streams: {done.stderr}")
    streams: list[dict[str, Any]] = json.loads(done.stdout)
    return streams
