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

__all__ = [
    "PAGE",
    "SHAPES",
    "Asked",
    "adamw_of",
    "any_model",
    "asked",
    "done",
    "kernel_bytes_of",
    "layer_of",
    "layers",
    "optimizer_step",
    "page",
    "ready",
    "release",
    "replayed",
    "steps",
]

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
GPT_1B: dict[str, Any] = {"layers": 16, "width": 2048, "heads": 16}
TOKENS = 16_384


_LIKELIEST = SamplingParams(temperature=0.0, max_tokens=99, ignore_eos=True)


class Asked(NamedTuple):
    """What a step of an engine is asked for."""

    name: str
    context: int
    """Tokens of each request that decodes."""

    decodes: int
    """Number of these."""

    prompt: int = 0
    """Tokens of a prompt in the step."""

    most: int = 8192
    """Tokens of a step: of a longer prompt the last chunk is asked for."""

    params: SamplingParams = _LIKELIEST


def asked(context: int = 1024, chunk: int = 512, prompt: int = 2048) -> list[Asked]:
    """The steps of the page."""
    decode = f"at {context:,} tokens"
    drawn = SamplingParams(temperature=1.0, max_tokens=99, ignore_eos=True)
    changed = SamplingParams(
        temperature=0.7, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1,
        presence_penalty=0.5, logit_bias={7: 1.0}, max_tokens=99, ignore_eos=True,
    )  # fmt: skip
    mixed = f"31 requests so, likeliest tokens, and a prompt of {chunk}"
    last = f"its last {chunk}, after the others"
    return [
        Asked(f"1 request, a token {decode}", context, 1),
        Asked(f"32 requests, a token each {decode}", context, 32),
        Asked("the same, drawn at temperature 1", context, 32, params=drawn),
        Asked("the same with filters and penalties", context, 32, params=changed),
        Asked(mixed, context, 31, prompt=chunk),
        Asked(f"a prompt of {prompt:,}", context, 0, prompt=prompt),
        Asked(last, context, 0, prompt=prompt, most=prompt - chunk),
    ]


def any_model(
    sizes: Mapping[str, Any], vocabulary: int, device: torch.device, dtype: torch.dtype
) -> LanguageModel:
    """A model whose weights are what the memory held."""
    config = validate(Config(model=ModelConfig(**sizes)), 1).model
    return LanguageModel(config, vocabulary, device=device, dtype=dtype, initialise=False)


def ready(step: Asked, model: LanguageModel, vocabulary: int, device: torch.device) -> Engine:
    """An engine of which the next step is the one that is asked for.

    Of what came before, only the host's part was done: keys and values are what the memory held.
    """
    engine = Engine(
        model,
        vocabulary=vocabulary,
        max_model_len=8 * step.context,
        num_blocks=(step.decodes + 2) * (step.context // 8) + max(step.prompt, 2 * step.context),
        num_state_slots=1,
        max_batch_tokens=step.most,
        max_requests=step.decodes + 1,
        prefix_cache=False,
        device=device,
    )
    for number in range(step.decodes):
        engine.add(Request(str(number), (1,) * step.context, step.params))
    # What a step leaves behind on the host, without the model.
    logits = partial(_any_logits, vocabulary, device)
    with mock.patch.object(engine._runner, "run", logits):
        begun: set[str] = set()
        while len(begun) < step.decodes:
            begun |= {output.request_id for output in done(engine)}
        # To the middle of a block: in the next step no request gets a new one.
        for _ in range(4 if step.decodes else 0):
            done(engine)
        tables = engine._allocator.tables
        tables.apply(upload(tables.changes(), device))
        if engine._runner.graphs is not None and not step.prompt:
            engine._runner.graphs.of(step.decodes)
        # Frequencies, which the first step computes.
        model._turns(torch.zeros(1, dtype=torch.int64, device=device))
        if step.prompt:
            engine.add(Request("prompt", (1,) * step.prompt, step.params))
        if step.prompt > step.most:
            done(engine)
    return engine


def done(engine: Engine) -> list[RequestOutput]:
    """What a step of an engine returns."""
    outputs = engine.step()
    if engine.step_error is not None:
        raise engine.step_error
    return outputs


def kernel_bytes_of(engine: Engine, params: SamplingParams) -> dict[str, Callable[..., int]]:
    """Bytes that launches of the next step move, of kernels that do not move all of each tensor."""
    return {
        "decode_kernel": partial(_decode_bytes, _lengths(engine)),
        "turn_kernel": _turn_bytes,
        "largest_kernel": lambda given, **_: given.logits.nbytes,
        "draw_kernel": lambda given, **_: given.logits.nbytes + given.mixed.nbytes,
        # What is listed between two cuts is little.
        "choose_kernel": lambda given, **_: (
            given.logits.nbytes * (params.top_k > 0) + 2 * given.scores.nbytes
        ),
        "edit_kernel": lambda told, **given: told.nbytes + 12 * given["num_edits"],
    }


def _lengths(engine: Engine) -> list[int]:
    """Tokens that each request has in memory."""
    return [live.num_computed for live in engine._scheduler.running]


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
    from torch.nn.attention.varlen import varlen_attn_out

    with (
        replayed(),
        mock.patch.object(on_device, "varlen_call", return_value=varlen_attn_out),
    ):
        return [_step(one) for one in asked()]


@contextmanager
def replayed() -> Iterator[None]:
    """Engines run a step again where they would replay a graph."""
    with mock.patch.object(runner, "recorder_for", return_value=_Replayed()):
        yield


class _Replayed:
    """Runs a step again where a graph would replay it."""

    def warm_up(self, body: Callable[[], Tensor]) -> None:
        body()

    def record(self, body: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        def replay() -> None:
            body()

        return body(), replay


def _step(step: Asked) -> Step:
    model = any_model(LLAMA_8B, VOCABULARY, GPU, torch.bfloat16)
    with counting():
        engine = ready(step, model, VOCABULARY, GPU)
    new_tokens = step.decodes + step.prompt % step.most
    num_requests = step.decodes + bool(step.prompt)
    lengths, by_kernel = _lengths(engine), kernel_bytes_of(engine, step.params)
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

    with (
        mock.patch.object(engine._runner, "run", run),
        mock.patch.object(attention_of_models, "paged_attention", attend),
        counting(by_kernel) as counted,
    ):
        done(engine)
    least = step_bytes(
        KeptBytes.of(model.memory_specs()),
        weights=model.step_weights().most_read(new_tokens),
        num_requests=num_requests,
        kept_tokens=sum(lengths),
        new_tokens=new_tokens,
        num_logits=num_requests * VOCABULARY,
        logits_dtype=torch.bfloat16,
    )
    return Step(step.name, counted, attention, counted.total - after_model, least.total)


def _any_logits(
    vocabulary: int, device: torch.device, plan: StepPlan, told: Sequence[Tensor]
) -> tuple[Tensor, Sequence[Tensor]]:
    rows = len(plan.decodes) + sum(len(chunk.logits_rows()) for chunk in plan.chunks)
    logits = torch.zeros(rows, vocabulary, dtype=torch.bfloat16, device=device)
    return logits, upload(told, device)


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
    return [_layer(name) for name in names]


def layer_of(
    name: str, device: torch.device, *, tokens: int = TOKENS, **sizes: int
) -> tuple[Any, Tensor, Context]:
    """A mixer of the page, in bf16 with our own kernels where there is a GPU, and its arguments.

    Args:
        name: Name in `SHAPES`.
        device: Device of its weights, which are what the memory held.
        tokens: Tokens of one sequence.
        sizes: Sizes in place of those of the shape.
    """
    letter, shape = SHAPES[name]
    given = {**shape, **sizes, "layers": 1, "pattern": letter, "mlp_width": "none"}
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = any_model(given, 256, device, dtype)
    mixer: Any = model.blocks[0].mixer
    if letter != "A" and device.type != "cpu":
        # As on CUDA without flash-linear-attention.
        mixer.kernels = Kernels("triton", "for the count")
    plan = plan_sequences(model, (0, tokens))
    # Tensors of offsets, which the layers of a step share.
    plan.prepare(device)
    context = Context(plan, model._rotation(plan))
    x = torch.empty(tokens, given["width"], dtype=dtype, device=device, requires_grad=True)
    return mixer, x, context


def _layer(name: str) -> Layer:
    with _no_autocast():
        mixer, x, context = layer_of(name, GPU)
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
    with StepCounter().counting():
        # Fake tensors of a CPU.
        optimizer, model = adamw_of(GPT_1B, VOCABULARY, torch.device("cpu"))
        optimizer.step()
        with counting() as counted:
            optimizer.step()
        return model.num_parameters(), counted


def adamw_of(
    sizes: Mapping[str, Any], vocabulary: int, device: torch.device
) -> tuple[torch.optim.Optimizer, LanguageModel]:
    """The optimizer of a model in fp32 whose gradients are there, and the model."""
    config = validate(Config(model=ModelConfig(**sizes)), 1)
    model = LanguageModel(config.model, vocabulary, device=device, initialise=False)
    optimizer = make_optimizer(model.named_parameters(), ParameterKinds.of(model), config.train)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    return optimizer, model


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
    text += _goal("attention launches of a layer, prompt of 2,048", 2, prompt.attention)
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
