"""The engine on a GPU against the engine on the CPU: eager, replayed, mixed and refused steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from inference_bench.plain_llama import PlainLlama, Shape, WideWeight
from pcomm.inference import Engine, Request, SamplingParams
from pcomm.inference.engine import runner
from pcomm.inference.engine.decode_graphs import CudaRecorder, GraphRecorder

SHAPE = Shape("small", 2, 64, 6, 2, 16, 64, 128)
LENGTHS = (1, 5, 17, 40, 66, 130)
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


class NoGraphs:
    """Where there is no device that records: the steps are run, and none is recorded."""

    def warm_up(self, body: Callable[[], Tensor]) -> None:
        body()

    def record(self, body: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        return body(), lambda: None


class Refuses:
    """Records nothing, after so many recordings of another one."""

    def __init__(self, recorder: GraphRecorder, number: int) -> None:
        self.recorder, self.left = recorder, number

    def warm_up(self, body: Callable[[], Tensor]) -> None:
        self.recorder.warm_up(body)

    def record(self, body: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        if not self.left:
            # As a model does whose step asks the device something.
            return self.recorder.record(lambda: _waits(body))
        self.left -= 1
        return self.recorder.record(body)


def _waits(body: Callable[[], Tensor]) -> Tensor:
    result = body()
    if result.is_cuda:
        torch.cuda.current_stream().synchronize()
    raise RuntimeError("not permitted while a graph is captured")


def model_on(device: torch.device) -> PlainLlama:
    model = PlainLlama(SHAPE, 256, dtype=torch.float32)
    model.layers = [tuple(weight.to(device) for weight in layer) for layer in model.layers]
    model.table_VD = model.table_VD.to(device)
    # Plain products on both, so that they differ by nothing but the device.
    model._products = [tuple(map(WideWeight, layer)) for layer in model.layers]
    model._head = WideWeight(model.table_VD)
    model.norm_D, model.rotations = model.norm_D.to(device), model.rotations.to(device)
    return model


def written(
    device: torch.device, recorder: GraphRecorder | None, **limits: int
) -> tuple[dict[str, list[tuple[int, float]]], tuple[int, ...], str]:
    """Tokens with log-probabilities of requests that come while others decode."""
    with patch.object(runner, "recorder_for", lambda device: recorder):
        engine = Engine(
            model_on(device),
            vocabulary=SHAPE.vocabulary,
            max_model_len=256,
            num_blocks=64,
            num_state_slots=2,
            max_requests=4,
            device=device,
            **limits,
        )
    if not limits:
        engine.record_graphs()
    found: dict[str, list[tuple[int, float]]] = {}
    waiting = list(enumerate(LENGTHS))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    step = 0
    while engine.has_work or waiting:
        if waiting and step % 3 == 0:
            index, length = waiting.pop(0)
            chance = random.Random(index)
            prompt = tuple(chance.randrange(SHAPE.vocabulary) for _ in range(length))
            engine.add(Request(str(index), prompt, params))
        for output in engine.step():
            assert output.error is None, output.error
            found.setdefault(output.request_id, []).extend(
                (one.token_id, one.logprob) for one in output.logprobs
            )
        assert engine.step_error is None, engine.step_error
        step += 1
    stats = engine.stats()
    engine.close()
    return found, stats.graph_sizes, stats.graph_refusal


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=GPU)])
def test_tokens_are_those_of_the_cpu_however_steps_are_run(kind: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device(kind)
    expected, _, _ = written(torch.device("cpu"), None)
    assert len({token for tokens in expected.values() for token, _ in tokens}) > 8

    forms: list[tuple[GraphRecorder | None, tuple[int, ...], dict[str, int]]] = [(None, (), {})]
    if kind == "cuda":
        forms += [
            (CudaRecorder(), (1, 2, 4), {}),
            # Chunks of prompts beside requests that decode, in most steps.
            (CudaRecorder(), (1, 2, 4), {"max_batch_tokens": 24}),
            (Refuses(CudaRecorder(), 1), (4,), {}),
        ]
    forms += [(None, (), {"max_batch_tokens": 24}), (Refuses(NoGraphs(), 0), (), {})]
    for made, sizes, limits in forms:
        found, recorded, refusal = written(device, made, **limits)
        assert set(recorded) <= set(sizes)
        assert bool(recorded) == bool(sizes)
        assert bool(refusal) == isinstance(made, Refuses), refusal
        for name, tokens in expected.items():
            assert [token for token, _ in found[name]] == [token for token, _ in tokens]
            # Sums of 64 products in fp32, in two layers and another order on each device.
            torch.testing.assert_close(
                torch.tensor([one for _, one in found[name]]),
                torch.tensor([one for _, one in tokens]),
                rtol=0,
                atol=1e-4,
            )
