"""Tokens per second of `LLM` and of llama.cpp on the same bf16 weights, in turns.

    python integration/benchmarks/llama_cpp/beside_llama_cpp.py DIR MODEL.gguf MODULES \\
        --csv docs/benchmarks/llama_cpp.csv

`make_gguf.py` writes MODEL.gguf from the weights of DIR, a Hugging Face directory; `npm install
node-llama-cpp` makes MODULES, its folder `node_modules`. Prompts are 32 equal-length rows of token
ids; greedy, end tokens ignored. llama.cpp keeps keys and values in fp16 and has its flash attention
on, which was faster in every case; `pcomm` keeps them in bf16.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from pcomm.inference import Request, SamplingParams
from pcomm.integration.llm import LLM

# The runner of benchmarks is in no wheel.
sys.path.append(str(Path(__file__).parents[3] / "packages" / "pcomm-core" / "benchmarks"))

from core_bench.rows import Row, row, save_rows
from core_bench.runner import Timing, take_turns
from core_bench.tables import lines_of

_PROMPT, _STREAMS = 32, (1, 8, 32)
_SCRIPT = Path(__file__).with_name("streams.mjs")


def main() -> None:
    """Measure, print and save the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("modules", type=Path)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    prompts = [
        [(7 * row + 13 * place) % 20000 + 500 for place in range(_PROMPT)]
        for row in range(max(_STREAMS))
    ]
    rows: list[Row] = []
    with ExitStack() as opened:
        file = opened.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))
        # As llama.cpp's context, each is made for so many streams.
        llms = {
            (streams, kind): opened.enter_context(
                _opened(arguments.directory, arguments.tokens, streams, kind)
            )
            for streams in _STREAMS
            for kind in (None, "int8")
        }
        json.dump(prompts, file)
        file.flush()

        def theirs(threads: int, streams: int) -> float:
            paths = [str(one) for one in (arguments.modules, arguments.gguf, file.name)]
            numbers = [str(one) for one in (threads, streams, arguments.tokens)]
            done = subprocess.run(
                ["node", str(_SCRIPT), *paths, *numbers], check=True, stdout=subprocess.PIPE
            )
            found = json.loads(done.stdout)
            print(found["version"], file=sys.stderr)
            return float(found["tokens_per_s"])

        def ours(kind: str | None) -> Callable[[int, int], float]:
            def run(threads: int, streams: int) -> float:
                torch.set_num_threads(threads)
                return tokens_per_s(llms[streams, kind], prompts[:streams], arguments.tokens)

            return run

        cases = {"llama.cpp": theirs, "pcomm": ours(None), "pcomm, int8": ours("int8")}
        for threads in (1, 2):
            for streams in _STREAMS:
                # Microseconds for a token of all streams.
                turns = {
                    name: partial(lambda run, *place: 1e6 / run(*place), run, threads, streams)
                    for name, run in cases.items()
                }
                found = take_turns(turns, arguments.rounds, warm_up=False)
                rows += _rows(found, f"threads {threads}, streams {streams}")
    print("\n".join(lines_of(rows)))
    if arguments.csv is not None:
        save_rows(arguments.csv, rows)


def _opened(directory: Path, tokens: int, streams: int, quantization: str | None) -> LLM:
    return LLM(
        directory,
        quantization=quantization,
        max_model_len=_PROMPT + tokens + 1,
        max_requests=streams,
        memory_bytes=1 << 28,
        prefix_cache=False,
    )


def tokens_per_s(llm: LLM, prompts: Sequence[Sequence[int]], count: int) -> float:
    """Tokens of all streams in a second, after each has its first one."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    for place, prompt in enumerate(prompts):
        llm.engine.add(Request(str(place), tuple(prompt), params))
    begun = set[str]()
    while len(begun) < len(prompts):
        begun |= {output.request_id for output in llm.engine.step()}
    start = time.perf_counter()
    while llm.engine.has_work:
        llm.engine.step()
    return len(prompts) * (count - 1) / (time.perf_counter() - start)


def _rows(found: dict[str, Timing], place: str) -> list[Row]:
    theirs, rows = found["llama.cpp"], []
    for name, timing in found.items():
        beside = (f"llama.cpp @ {place}", theirs.ratio_to(timing))
        rate, rounds, case = 1e6 / timing.median_us, len(timing.rounds_us), f"{name} @ {place}"
        other = None if timing is theirs else beside
        rows.append(row("llama_cpp", case, rate, "tokens/s", rounds, beside=other))
    return rows


if __name__ == "__main__":
    main()
