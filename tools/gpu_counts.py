"""Write docs/gpu-counts.md: what steps ask of a GPU, counted on tensors without memory.

    python tools/gpu_counts.py

The models, the engine and the optimizer are those of a run. A test compares the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn_out

from device_counter import Counted, counting
from pcomm.gdn_cp.ops import Kernels
from pcomm.inference import Engine, Request, RequestOutput, SamplingParams
from pcomm.inference.attention import on_device
from pcomm.inference.attention.paged_attention import paged_attention
from pcomm.inference.engine import runner
from pcomm.inference.engine.scheduler import StepPlan
from pcomm.inference.roofline.step_bytes import KeptBytes, step_bytes
from pcomm.inference.upload import upload
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, ModelConfig
from pcomm.integration.forecast.counted_step import StepCounter
from pcomm.integration.models import attention as attention_of_models
from pcomm.integration.models.forward_context import Context
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.parallelize import plan_sequences
from pcomm.integration.train.optimizers import ParameterKinds, make_optimizer
from repository import ROOT
from training_memory import RUNS, Run, section

__all__ = ["PAGE", "layers", "optimizer_step", "page", "release", "steps"]

PAGE = ROOT / "docs" / "gpu-counts.md"
# Where a tensor is that has no memory, and is not on the host.
GPU = torch.device("meta")
VOCABULARY = 128_256
LAYERS = 32
LLAMA_8B: dict[str, Any] = {
    "layers": LAYERS,
    "width": 4096,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "mlp_width": 14_336,
    "tie_embeddings": False,
}
TOKENS = 16_384
_CONTEXT, _CHUNK, _PROMPT = 1024, 512, 2048


class Step(NamedTuple):
    """A step of the engine."""

    name: str
    counted: Counted
    attention: int
    """Launches within the attention of a layer; the first also makes what all of them share."""

    sampling: int
    """Launches behind the logits."""

    least_bytes: int
    """Bytes of the weights, of the keys and values that tokens see, and of the logits."""


def steps() -> list[Step]:
    """Steps of an engine with a model in the shape of Llama 3.1 8B in bf16."""
    decode = f"at {_CONTEXT:,} tokens"
    drawn = SamplingParams(temperature=1.0, max_tokens=99, ignore_eos=True)
    changed = SamplingParams(
        temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1,
        presence_penalty=0.5, logit_bias={7: 1.0}, max_tokens=99, ignore_eos=True,
    )  # fmt: skip
    with (
        mock.patch.object(runner, "recorder_for", return_value=_Replayed()),
        mock.patch.object(on_device, "_attention_of_chunks", return_value=varlen_attn_out),
    ):
        return [
            _step(f"1 request, a token {decode}", 1),
            _step(f"32 requests, a token each {decode}", 32),
            _step("the same, drawn at temperature 1", 32, params=drawn),
            _step("the same with filters and penalties", 32, params=changed),
            _step(f"31 requests so, likeliest tokens, and a prompt of {_CHUNK}", 31, prompt=_CHUNK),
            _step(f"a prompt of {_PROMPT:,}", 0, prompt=_PROMPT),
            _step(f"its last {_CHUNK}, after the others", 0, prompt=_PROMPT, most=_PROMPT - _CHUNK),
        ]


class _Replayed:
    """Runs a step again where a graph would replay it."""

    def warm_up(self, body: Callable[[], Tensor]) -> None:
        body()

    def record(self, body: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        def replay() -> None:
            body()

        return body(), replay


_LIKELIEST = SamplingParams(temperature=0.0, max_tokens=99, ignore_eos=True)


def _step(
    name: str,
    decodes: int,
    *,
    prompt: int = 0,
    most: int = 8192,
    params: SamplingParams = _LIKELIEST,
) -> Step:
    """A step with a prompt, or the last chunk of one, of which a step has so many tokens."""
    config = validate(Config(model=ModelConfig(**LLAMA_8B)), 1).model
    model = LanguageModel(config, VOCABULARY, device=GPU, dtype=torch.bfloat16, initialise=False)
    engine = Engine(
        model,
        vocabulary=VOCABULARY,
        max_model_len=8192,
        num_blocks=(decodes + 2) * (_CONTEXT // 8) + _PROMPT,
        num_state_slots=1,
        max_batch_tokens=most,
        max_requests=decodes + 1,
        prefix_cache=False,
        device=GPU,
    )
    for number in range(decodes):
        engine.add(Request(str(number), (1,) * _CONTEXT, params))
    # What a step leaves behind on the host, without the model.
    unused = mock.patch.object(engine._runner, "run", _any_logits)
    with unused, counting():
        begun: set[str] = set()
        while len(begun) < decodes:
            begun |= {output.request_id for output in _done(engine)}
        # To the middle of a block: in the next step no request gets a new one.
        for _ in range(4 if decodes else 0):
            _done(engine)
        tables = engine._allocator.tables
        tables.apply(upload(tables.changes(), GPU))
        if engine._runner.graphs is not None and not prompt:
            engine._runner.graphs.of(decodes)
        # Frequencies, which the first step computes.
        model._turns(torch.empty(1, dtype=torch.int64, device=GPU))
    if prompt:
        engine.add(Request("prompt", (1,) * prompt, params))
    if prompt > most:
        with unused, counting():
            _done(engine)
    new_tokens = decodes + prompt % most
    lengths = [live.num_computed for live in engine._scheduler.running]
    after_model = attention = 0

    def run(*given: Any, run: Any = engine._runner.run) -> Any:
        nonlocal after_model
        found = run(*given)
        after_model = counted.total
        return found

    def attend(*tensors: Any, attend: Any = paged_attention, **options: Any) -> Tensor:
        nonlocal attention
        before = counted.total
        mixed: Tensor = attend(*tensors, **options)
        attention = counted.total - before
        return mixed

    by_kernel: dict[str, Callable[..., int]] = {
        "decode_kernel": partial(_decode_bytes, lengths),
        "turn_kernel": _turn_bytes,
        "largest_kernel": lambda given, **_: given.logits.nbytes,
        "draw_kernel": lambda given, **_: given.logits.nbytes + given.mixed.nbytes,
        # What is listed between two cuts is little.
        "choose_kernel": lambda given, **_: (
            given.logits.nbytes * (params.top_k > 0) + 2 * given.scores.nbytes
        ),
        "edit_kernel": lambda told, **given: told.nbytes + 12 * given["num_edits"],
    }
    with (
        mock.patch.object(engine._runner, "run", run),
        mock.patch.object(attention_of_models, "paged_attention", attend),
        counting(by_kernel) as counted,
    ):
        _done(engine)
    least = step_bytes(
        KeptBytes.of(model.memory_specs()),
        weights=model.step_weights().most_read(new_tokens),
        num_requests=decodes + bool(prompt),
        kept_tokens=sum(lengths),
        new_tokens=new_tokens,
        num_logits=(decodes + bool(prompt)) * VOCABULARY,
        logits_dtype=torch.bfloat16,
    )
    return Step(name, counted, attention, counted.total - after_model, least.total)


def _any_logits(plan: StepPlan, told: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    rows = len(plan.decodes) + sum(len(chunk.logits_rows()) for chunk in plan.chunks)
    logits = torch.empty(rows, VOCABULARY, dtype=torch.bfloat16, device=GPU)
    return logits, upload(told, GPU)


def _done(engine: Engine) -> list[RequestOutput]:
    outputs = engine.step()
    if engine.step_error is not None:
        raise engine.step_error
    return outputs


def _decode_bytes(lengths: Sequence[int], **given: Any) -> int:
    """What a launch of the kernel of decoding moves: live keys and values, and its partial sums."""
    keys, values, new = given["keys"], given["values"], given["new"]
    of_token: int = (keys[0, 0].numel() + values[0, 0].numel()) * keys.element_size()
    num_requests, num_heads, _ = new.q.shape
    own = 0
    for length in lengths:
        splits = -(-(length + 1) // given["SPLIT"])
        if splits > 1:
            own += splits * num_heads * (values.shape[3] + 2) * 8
    moved: int = sum(one.nbytes for one in (new.q, new.k, new.v, given["out"]))
    pairs: int = num_requests * keys.shape[2]
    # The new token is written, and read with the others.
    return moved + own + 4 * pairs + sum(length + 2 for length in lengths) * of_token


def _turn_bytes(**given: Any) -> int:
    """What a launch moves that turns the heads of a prompt: of the blocks, the new tokens alone."""
    new, turn = given["new"], given["turn"]
    moved = [given["turned"], given["seen"], given["slots"], turn.cosines, turn.sines]
    moved += [new.q, *2 * [new.k, new.v]]
    return sum(one.nbytes for one in moved)


class Layer(NamedTuple):
    """A mixer of a model in training."""

    name: str
    forward: Counted
    backward: Counted


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Gated DeltaNet, as in Qwen3-Next": (
        "G",
        {
            "width": 2048,
            "heads": 16,
            "gdn_key_heads": 16,
            "gdn_value_heads": 32,
            "gdn_key_dim": 128,
            "gdn_value_dim": 128,
        },
    ),
    "Mamba-2, as in Mamba-2 2.7B": (
        "M",
        {"width": 2560, "heads": 20, "mamba_heads": 80, "mamba_head_dim": 64},
    ),
    "attention, as in Llama 3.1 8B": ("A", {**LLAMA_8B, "layers": 1}),
}


def layers(names: Iterable[str] = SHAPES) -> list[Layer]:
    """Each kind of mixer, forward and backward, in bf16 on one sequence of 16,384 tokens."""
    return [_layer(name, *SHAPES[name]) for name in names]


def _layer(name: str, letter: str, shape: Mapping[str, Any]) -> Layer:
    sizes = {**shape, "layers": 1, "pattern": letter, "mlp_width": "none"}
    config = validate(Config(model=ModelConfig(**sizes)), 1).model
    with _no_autocast():
        model = LanguageModel(config, 256, device=GPU, dtype=torch.bfloat16, initialise=False)
        mixer: Any = model.blocks[0].mixer
        if letter != "A":
            # As on CUDA without flash-linear-attention.
            mixer.kernels = Kernels("triton", "for the count")
        plan = plan_sequences(model, (0, TOKENS))
        # Tensors of offsets, which the layers of a step share.
        plan.prepare(GPU)
        context = Context(plan, model._rotation(plan))
        x = torch.empty(TOKENS, config.width, dtype=torch.bfloat16, device=GPU, requires_grad=True)
        with counting() as counted:
            y = mixer(x, context)
            forward = counted.so_far()
            torch.autograd.grad(y, [x, *mixer.parameters()], torch.empty_like(y))
    return Layer(name, forward, counted - forward)


@contextmanager
def _no_autocast() -> Iterator[None]:
    """Leave autocast out, which torch does not know for tensors without memory; it is off here."""
    with (
        mock.patch.object(torch, "autocast", return_value=nullcontext()),
        mock.patch.object(torch, "is_autocast_enabled", return_value=False),
    ):
        yield


def optimizer_step() -> tuple[int, Counted]:
    """Parameters of a GPT of 1B, and a step of its optimizer: AdamW, all in fp32."""
    config = validate(Config(model=ModelConfig(layers=16, width=2048, heads=16)), 1)
    with StepCounter().counting():
        model = LanguageModel(config.model, VOCABULARY, initialise=False)
        optimizer = make_optimizer(model.named_parameters(), ParameterKinds.of(model), config.train)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        with counting() as counted:
            optimizer.step()
        return model.num_parameters(), counted


# -- the page --------------------------------------------------------------------------------

_HEAD = """\
# What a GPU is asked for

Counted on a CPU with torch {torch}, on tensors that have shapes and no memory:
`python tools/gpu_counts.py` writes this page, and a test compares it. No GPU was used, and nothing
here is a time. An operation that torch hands to a device is one launch, a view none; a library may
make more of a product. Bytes are those that operations read and write, as if no cache kept them.
No kernel of flash-linear-attention is there. What our own kernels are compiled to is
[on a page beside](gpu-kernels.md).

## Serving

The engine with a model in the shape of Llama 3.1 8B in bf16, {layers} layers. A step in which all
requests decode is replayed as one CUDA graph: the copy of its integers comes before, choosing the
tokens behind it, and all other launches are its nodes. Its attention is that of a layer behind the
first, which also makes what all share; chunks are one call of torch's `varlen_attn_out`. An upload
is a copy from the host, which on CUDA reads pinned memory and waits for nothing; the wait is that
for the tokens. The least GB are those of the weights, of the live keys and values, and of the
logits.

| step | launches | a layer | its attention | choosing | waits | uploads | GB | least | ratio |
|---|---|---|---|---|---|---|---|---|---|
"""
_LAYERS = """
## Training

One mixer in bf16, one sequence of {tokens:,} tokens, without the norm before it. Kernels of
pcomm-gdn-cp compute the recurrences and what is around them, as on CUDA without
flash-linear-attention. Torch would launch 2,161 and 2,541 for Gated DeltaNet, 605 and 690 for
Mamba-2, and move 118.24 and 90.09 GB.

| mixer | launches forward | backward | waits | GB forward | backward |
|---|---|---|---|---|---|
"""
_OPTIMIZER = """
A step of AdamW in fp32 on a GPT of {count:,} parameters is {launches} launches, {waits} waits and
{size} GB: parameters and both averages read and written, gradients read.
"""
_GOALS = """
## Beside the goals

| what | goal | counted | |
|---|---|---|---|
"""


def page(runs: Iterable[Run] = RUNS) -> str:
    """The text of the page, with memory in these runs."""
    served, trained = steps(), layers()
    count, update = optimizer_step()
    text = _HEAD.format(torch=release(), layers=LAYERS)
    for one in served:
        c = one.counted
        cells = [
            *(one.name, f"{c.total:,}", f"{_a_layer(c.total - one.sampling):.1f}"),
            *(one.attention, one.sampling, c.waits, c.uploads),
            *(_gb(c.num_bytes), _gb(one.least_bytes), f"{c.num_bytes / one.least_bytes:.2f}"),
        ]
        text += _row(cells)
    text += _LAYERS.format(tokens=TOKENS)
    for layer in trained:
        there, back = layer.forward, layer.backward
        waits = there.waits + back.waits
        sizes = (_gb(there.num_bytes), _gb(back.num_bytes))
        text += _row([layer.name, f"{there.total:,}", f"{back.total:,}", waits, *sizes])
    text += _OPTIMIZER.format(
        count=count, launches=update.total, waits=update.waits, size=_gb(update.num_bytes)
    )
    text += section(runs)
    text += _GOALS
    decode, many, drawn, changed, mixed, prompt, _ = served
    of_layer = _a_layer(decode.counted.total - decode.sampling)
    text += _goal("uploads of a step", 1, max(one.counted.uploads for one in served))
    text += _goal("waits of a step", 1, max(one.counted.waits for one in served))
    text += _goal("launches of a layer to decode", 7, of_layer)
    text += _goal(
        "bytes of decoding, of the least", 1.05, many.counted.num_bytes / many.least_bytes
    )
    text += _goal("launches to draw tokens", 5, drawn.sampling)
    text += _goal("the same with filters and penalties", 5, changed.sampling)
    text += _goal(f"attention launches of a layer, prompt of {_PROMPT:,}", 2, prompt.attention)
    text += _goal("the same beside requests that decode", 3, mixed.attention)
    for layer in trained[:2]:
        kind = layer.name.partition(",")[0]
        text += _goal(f"{kind}, launches forward", 25, layer.forward.total)
        text += _goal(f"{kind}, launches backward", 40, layer.backward.total)
    return text


def release() -> str:
    """Torch's release, on which operations depend: `2.13`."""
    return ".".join(torch.__version__.split(".")[:2])


def _a_layer(launches: int) -> float:
    return launches / LAYERS


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f}"


def _goal(what: str, goal: float, found: float) -> str:
    verdict = "met" if found <= goal else f"missed, {found / goal:.1f} times the goal"
    return _row([what, f"{goal:g}", f"{found:,.4g}" if found < 1000 else f"{found:,.0f}", verdict])


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
