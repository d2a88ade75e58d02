"""Small measurements for `first_gpu_hour.py` that no benchmark of a package makes.

    python tools/gpu_measurements.py NAME [--fast]

A line of JSON for each case. Without a GPU each runs with tiny shapes on the CPU, so that its code
is carried out; those times mean nothing, and the lines say `cpu`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

# Benchmarks are no part of the wheels.
sys.path.append(str(Path(__file__).parents[1] / "packages" / "pcomm-inference" / "benchmarks"))

from inference_bench.plain_llama import SHAPES, Shape

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
Rows = Iterator[dict[str, Any]]
LLAMA_8B = Shape("Llama-8B", 32, 4096, 32, 8, 128, 14336, 128256)
# Lengths of prompts, and tiny ones.
_PROMPTS = ((2048, 8192), (32, 64))


def main() -> None:
    """Print the lines of one measurement."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=MEASUREMENTS)
    parser.add_argument("--fast", action="store_true", help="tiny shapes")
    chosen = parser.parse_args()
    device = torch.cuda.get_device_name() if ON_GPU else "cpu"
    for row in MEASUREMENTS[chosen.name](chosen.fast or not ON_GPU):
        print(json.dumps({"device": device, **row}), flush=True)


def _synchronise() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def _ms(run: Callable[[], Any], rounds: int) -> float:
    """Median of the time of a call that the device has ended, after one; of one alone for 0."""
    times: list[float] = []
    for _ in range(rounds + 1):
        _synchronise()
        begin = time.perf_counter()
        run()
        _synchronise()
        times.append((time.perf_counter() - begin) * 1e3)
    return round(statistics.median(times[1:] or times), 4)


def _repeat(run: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        run()


def _launches(run: Callable[[], Any]) -> int | None:
    """Kernels of a call, as the profiler counts them; None without a GPU."""
    if not ON_GPU:
        return None
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    return len([event for event in recorded.events() if event.device_type.name == "CUDA"])


def copies(fast: bool) -> Rows:
    """The copy loop of the kernels of pcomm-nvls, with more vectors in flight and more blocks."""
    if not ON_GPU:
        yield {"case": "not run: the kernel is assembly of a GPU"}
        return
    from gpu_copy_kernel import copy_kernel

    for megabytes in (1,) if fast else (1, 8, 64):
        x = torch.randint(0, 255, (megabytes << 20,), dtype=torch.uint8, device=DEVICE)
        out = torch.empty_like(x)
        for vectors in (1, 4, 8):
            for blocks in (8, 16, 32, 132):
                grid, numbers = (blocks,), (x, out, x.numel() // 16)
                run = partial(copy_kernel[grid], *numbers, BLOCK=512 * vectors, num_warps=16)
                run()
                assert torch.equal(x, out)
                ms = _ms(partial(_repeat, run, 20), 10) / 20
                case = f"{megabytes} MiB, {vectors} vectors, {blocks} blocks"
                yield {"case": case, "ms": ms, "GB/s": round(2 * x.numel() / ms / 1e6, 1)}


def layers(fast: bool) -> Rows:
    """The recurrences of a Gated DeltaNet and of a Mamba-2 layer, forward and backward."""
    from pcomm.gdn_cp.ops import choose_kernels

    tokens, heads, width = (256, 4, 16) if fast else (16_384, 32, 128)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    kernels = choose_kernels(DEVICE, dtype)

    def random_of(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=dtype).requires_grad_()

    shape = (tokens, heads, width)
    q, k, v = (random_of(*shape) for _ in range(3))
    keys = torch.nn.functional.normalize(k.detach(), dim=-1).requires_grad_()
    gates = torch.nn.functional.logsigmoid(torch.randn(tokens, heads, device=DEVICE) + 3)
    beta, dt = (torch.rand(tokens, heads, device=DEVICE) for _ in range(2))
    b, c = (random_of(tokens, 1, width) for _ in range(2))
    a_log, bias = torch.zeros(heads, device=DEVICE), torch.zeros(heads, device=DEVICE)
    for sequences in (1, 64):
        ends = tuple(range(0, tokens + 1, tokens // sequences))

        def delta(ends: tuple[int, ...] = ends) -> torch.Tensor:
            tensors = (q, keys, v, gates, beta)
            return kernels.chunk_gated_delta_rule(*tensors, cu_seqlens=ends)[0]

        def space(ends: tuple[int, ...] = ends) -> torch.Tensor:
            tensors = (v, dt, a_log, b, c)
            return kernels.chunk_mamba2_ssd(*tensors, dt_bias_H=bias, cu_seqlens=ends)[0]

        for name, run, leaves in (("gdn", delta, (q, keys, v)), ("mamba2", space, (v, b, c))):

            def both(run: Any = run, leaves: Any = leaves) -> None:
                result = run()
                torch.autograd.grad(result, leaves, torch.ones_like(result))

            case = f"{name}, {tokens} tokens, {sequences} sequences, by {kernels.describe()}"
            yield {
                "case": case,
                "forward ms": _ms(run, 5),
                "both ms": _ms(both, 5),
                "forward launches": _launches(run),
                "launches": _launches(both),
            }


def _llama(fast: bool, longest: int) -> Any:
    """A model of random weights in the shape of Llama 3.1 8B, whose head is its embedding."""
    from inference_bench.plain_llama import PlainLlama

    return PlainLlama(SHAPES[0] if fast else LLAMA_8B, longest, torch.bfloat16, DEVICE)


def _engine(
    model: Any, requests: int, longest: int, held: int, is_eager: bool, vocabulary: int = 0
) -> Any:
    """An engine with room for requests of so many tokens, and for the longest one."""
    from pcomm.inference import Engine

    engine = Engine(
        model,
        vocabulary=vocabulary or model.shape.vocabulary,
        max_model_len=longest,
        num_blocks=2 * requests * (held // 16 + 2) + longest // 16,
        num_state_slots=2,
        max_batch_tokens=8192,
        max_requests=requests + 1,
        prefix_cache=False,
        device=DEVICE,
    )
    if is_eager:
        engine._runner.graphs = None
    return engine


def _add(engine: Any, name: str, length: int, vocabulary: int, tokens: int) -> None:
    from pcomm.inference import Request, SamplingParams

    chance = random.Random(length)
    prompt = tuple(chance.randrange(vocabulary) for _ in range(length))
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    engine.add(Request(name, prompt, params))


def decode(fast: bool) -> Rows:
    """A step of decoding by number of requests and `max_model_len`, replayed and eager; mixed."""
    lengths, prompt = ((256,), 32) if fast else ((2048, 8192, 32768), 1024)
    model, rounds = _llama(fast, lengths[-1]), 3 if fast else 20
    vocabulary = model.shape.vocabulary
    for longest in lengths:
        for requests in (1, 8, 32):
            for is_eager in (False, True):
                case = f"{requests} x {prompt} tokens, max_model_len {longest}"
                case += ", eager" if is_eager else ", graphs"
                try:
                    engine = _engine(model, requests, longest, prompt + 64, is_eager)
                    for number in range(requests):
                        _add(engine, str(number), prompt, vocabulary, rounds + 40)
                    while len(engine.step()) < requests:
                        pass
                    for _ in range(4):
                        engine.step()
                    ms = _ms(engine.step, rounds)
                    row = {"case": case, "ms": ms, "launches": _launches(engine.step)}
                    if longest == lengths[0] and requests == 32:
                        _add(engine, "mixed", prompt // 2, vocabulary, 1)
                        row["with a prompt ms"] = _ms(engine.step, 0)
                    stats = engine.stats()
                    yield {**row, "sizes": stats.graph_sizes, "refusal": stats.graph_refusal[:200]}
                    engine.close()
                except Exception as error:
                    yield {"case": case, "error": f"{type(error).__name__}: {error}"[:300]}
                engine = None
                if ON_GPU:
                    torch.cuda.empty_cache()


def prefill(fast: bool) -> Rows:
    """The first token of one prompt, in a batch of its own."""
    lengths = _PROMPTS[fast]
    model = _llama(fast, 2 * lengths[-1])
    for length in lengths:
        engine = _engine(model, 1, 2 * lengths[-1], length + 16, True)

        def once(engine: Any = engine, length: int = length) -> None:
            _add(engine, "one", length, model.shape.vocabulary, 1)
            while engine.has_work:
                engine.step()

        yield {"case": f"prompt of {length}", "ms": _ms(once, 3), "launches": _launches(once)}
        engine.close()


def transformers(fast: bool) -> Rows:
    """A prompt and a token of the same shape by transformers, where that is installed."""
    shape, lengths = SHAPES[0] if fast else LLAMA_8B, _PROMPTS[fast]
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        yield {"case": "transformers is not installed"}
        return
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.mlp_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=2 * lengths[-1],
        tie_word_embeddings=True,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE), torch.inference_mode():
        other = LlamaForCausalLM(config)
        other.train(False)
        for length in lengths:
            tokens = torch.zeros(1, length, dtype=torch.int64)
            ms = _ms(partial(other, tokens, logits_to_keep=1), 3)
            yield {"case": f"transformers, prompt of {length}", "ms": ms}
        tokens = torch.zeros(1, lengths[0] // 2, dtype=torch.int64)
        cache = other(tokens, logits_to_keep=1, use_cache=True).past_key_values
        step = torch.zeros(1, 1, dtype=torch.int64)
        ms = _ms(lambda: other(step, past_key_values=cache, use_cache=True), 10)
        yield {"case": f"transformers, a token after {lengths[0] // 2}", "ms": ms}


def unchanged(fast: bool) -> Rows:
    """Programs of others: a model of transformers sharded and served, and torch's own collectives.

    One rank, whose group has the backend "nvls" for a GPU, and gloo without one.
    """
    import torch.distributed as dist

    from pcomm.core.errors import PcommError
    from pcomm.fsdp import Precision, fully_shard
    from pcomm.inference import TransformersModel
    from pcomm.nvls import register_backend

    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        yield {"case": "transformers is not installed"}
        return
    width, rounds = (64, 2) if fast else (2048, 10)
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": 4,
    }
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_attention_heads=4, **sizes))
    tokens = torch.randint(512, (2, 32 if fast else 2048))
    model.to(DEVICE)
    tokens = tokens.to(DEVICE)

    served = TransformersModel(model)
    engine = _engine(served, 1, 64, 32, is_eager=False, vocabulary=512)
    _add(engine, "one", 16, 512, 16)
    written: list[int] = []
    begin = time.perf_counter()
    while engine.has_work:
        written += [id for output in engine.step() for id in output.token_ids]
    ms = round((time.perf_counter() - begin) * 1e3 / len(written), 3)
    engine.close()
    served.close()
    chance = random.Random(16)
    prompt = torch.tensor([[chance.randrange(512) for _ in range(16)]], device=DEVICE)
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    expected = model.generate(prompt, **options)[0, 16:].tolist()
    same = written == expected
    yield {"case": "TransformersModel, 16 tokens", "ms": ms, "as generate writes": same}

    register_backend(max_bytes=1 << 20)
    backend = "cpu:gloo,cuda:nvls" if ON_GPU else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.ones(1 << 16, device=DEVICE)
        ms = _ms(partial(dist.all_reduce, x), rounds)
        yield {
            "case": f"all_reduce of 256 KiB by {backend}",
            "ms": ms,
            "right": bool((x == 1).all()),
        }

        def step() -> torch.Tensor:
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            return loss.detach()

        plain, plain_ms = float(step()), _ms(step, rounds)
        mesh = dist.init_device_mesh(DEVICE.type, (1,))
        fully_shard(model, mesh, precision=Precision(torch.bfloat16))
        found, ms = float(step()), _ms(step, rounds)
        case = "fully_shard of a Llama, forward and backward"
        yield {"case": case, "ms": ms, "plain ms": plain_ms, "loss": found, "plain loss": plain}
    except PcommError as error:
        yield {"case": "refused", "error": str(error)[:300]}
    finally:
        dist.destroy_process_group()


def soak(fast: bool) -> Rows:
    """Tokens of replayed steps against those of eager ones, again and again; memory at the end."""
    model = _llama(True, 256)
    vocabulary, found = model.shape.vocabulary, list[dict[str, list[int]]]()
    end = time.monotonic() + (1 if fast else 30)
    rounds = 0
    while time.monotonic() < end or rounds < 2:
        engine = _engine(model, 8, 256, 128, is_eager=rounds == 0)
        for number in range(8):
            _add(engine, str(number), 8 + 3 * number, vocabulary, 40)
        written: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                written.setdefault(output.request_id, []).extend(output.token_ids)
        engine.close()
        same = not found or written == found[0]
        found = found or [written]
        rounds += 1
        if not same:
            yield {"case": f"round {rounds}: replayed steps wrote other tokens"}
            return
    used = torch.cuda.max_memory_allocated() >> 20 if ON_GPU else 0
    yield {"case": "replayed steps wrote the same tokens", "rounds": rounds, "MiB": used}


def kernels(fast: bool) -> Rows:
    """Kernels as docs/gpu-kernels.md predicts them."""
    import gpu_as_predicted

    yield from gpu_as_predicted.kernels(DEVICE)


def counts(fast: bool) -> Rows:
    """Launches, waits and uploads as docs/gpu-counts.md predicts them."""
    import gpu_as_predicted

    yield from gpu_as_predicted.counts(DEVICE, fast)


MEASUREMENTS: dict[str, Callable[[bool], Rows]] = {
    "copies": copies,
    "layers": layers,
    "kernels": kernels,
    "counts": counts,
    "decode": decode,
    "prefill": prefill,
    "transformers": transformers,
    "unchanged": unchanged,
    "soak": soak,
}

if __name__ == "__main__":
    main()
