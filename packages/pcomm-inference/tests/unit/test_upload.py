"""A step is told in one copy, for which nothing waits and which is not written too early.

On a device that does nothing before the host waits for it, with interpreted kernels. Of each test
the tokens are those of an engine on the CPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from inference_bench.plain_llama import PlainLlama, Shape, WideWeight
from inference_support.kernels import interpreted_kernels
from inference_support.late_device import DEVICE, LateDevice
from pcomm.core.testing.assertions import assert_equal
from pcomm.inference import Engine, Request, SamplingParams
from pcomm.inference.engine import runner
from pcomm.inference.engine.pools import BlockTables
from pcomm.inference.sampling.sampler import Sampler
from pcomm.inference.upload import packed_int32, unpacked_int32, upload

CPU = torch.device("cpu")
SHAPE = Shape("small", 1, 32, 4, 2, 8, 32, 64)
GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 3}
EDITED: dict[str, Any] = {
    "temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.3,
    "logit_bias": {7: 1.0}, "min_p": 0.01, "min_tokens": 3,
}  # fmt: skip
# Lengths of prompts and settings; the last ones begin where others have ended, in their rows.
REQUESTS = [(9, GREEDY), (17, DRAWN), (5, EDITED), (1, GREEDY), (11, EDITED)]


class Step(NamedTuple):
    """What a step asked of the device.

    Attributes:
        before: Copies before the model.
        uploads: Copies.
        waits: Number of times that the host waited.
        is_sampled: Whether it gave tokens.
    """

    before: int
    uploads: int
    waits: int
    is_sampled: bool


class Odd:
    """A grammar that allows odd ids.

    Args:
        note: Called when it is asked for them.
    """

    is_finished = False

    def __init__(self, note: Callable[[], object]) -> None:
        self.note = note

    def allowed_words(self) -> Tensor:
        self.note()
        return torch.tensor([-0x55555556] * 2, dtype=torch.int32)

    def accept(self, token_id: int) -> None:
        assert token_id % 2


class Letters:
    """A tokenizer without tokens that end a text."""

    eos_ids = ()

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Model(PlainLlama):
    """The same weights on both devices, and plain products.

    Args:
        device: Device of the model.
        late: The late device; None for the CPU.
        failing: Number of the step that raises once it is queued; None for none.
    """

    def __init__(self, device: torch.device, late: LateDevice | None, failing: int | None) -> None:
        super().__init__(SHAPE, 64, dtype=torch.float32)
        self.late, self.failing, self.uploads, self.num_steps = late, failing, 0, 0
        self.table_VD = self.table_VD.to(device)
        self._products = [
            tuple(WideWeight(weight.to(device)) for weight in layer) for layer in self.layers
        ]
        # Not the embedding, by which the likeliest token would often be the one before.
        head = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
        self._head = WideWeight(head.to(device))
        self.offsets: set[int] = set()
        self.norm_D, self.rotations = self.norm_D.to(device), self.rotations.to(device)

    def step(self, batch: Any, memory: Any) -> Tensor:
        if self.late is not None:
            self.uploads = self.late.uploads
            self.offsets.add(batch.context_lens_N.storage_offset() * 4 % 16)
        logits = super().step(batch, memory)
        self.num_steps += 1
        if self.num_steps == self.failing:
            raise ArithmeticError("a step that fails")
        return logits


def written(
    late: LateDevice | None,
    requests: Sequence[tuple[int, dict[str, Any]]] = REQUESTS,
    steps: list[Step] | None = None,
    *,
    note: Callable[[], object] = lambda: None,
    recorder: LateDevice | None = None,
    failing: int | None = None,
    **limits: int,
) -> dict[str, list[int]]:
    """Tokens of requests that come one after the other, two steps apart.

    Those with `"regex"` among their settings have `Odd` in its place.
    """
    device = CPU if late is None else DEVICE
    model = Model(device, late, failing)
    with patch.object(runner, "recorder_for", lambda device: recorder):
        engine = Engine(
            model,
            vocabulary=SHAPE.vocabulary,
            max_model_len=40,
            block_size=4,
            num_blocks=40,
            num_state_slots=1,
            max_requests=3,
            tokenizer=Letters(),
            device=device,
            **limits,
        )
    found: dict[str, list[int]] = {str(number): [] for number in range(len(requests))}
    waiting, number = list(enumerate(requests)), 0

    def compiled(params: SamplingParams) -> Any:
        return SimpleNamespace(begin=lambda: Odd(note)) if params.regex else None

    with patch.object(engine._grammars, "compile", compiled):
        while engine.has_work or waiting:
            if waiting and number % 2 == 0:
                name, (length, settings) = waiting.pop(0)
                chance = random.Random(name)
                prompt = tuple(chance.randrange(SHAPE.vocabulary) for _ in range(length))
                params = SamplingParams(max_tokens=5, ignore_eos=True, **settings)
                engine.add(Request(str(name), prompt, params))
            before = (late.uploads, late.waits) if late is not None else (0, 0)
            outputs = engine.step()
            for output in outputs:
                assert output.error is None, output.error
                found[output.request_id] += output.token_ids
            if steps is not None and late is not None:
                uploads, waits = late.uploads - before[0], late.waits - before[1]
                steps.append(Step(model.uploads - before[0], uploads, waits, bool(outputs)))
            number += 1
    # As a tensor of its own: of a kernel there is one form.
    assert model.offsets <= {0}
    stats = engine.stats()
    assert bool(stats.graph_sizes) == (recorder is not None), stats.graph_refusal
    engine.close()
    return found


@pytest.fixture
def late() -> Iterator[LateDevice]:
    with interpreted_kernels(), LateDevice().running() as device:
        yield device


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, list[int]]:
    found = written(None)
    assert min(len(set(tokens)) for tokens in found.values()) > 2
    return found


@pytest.mark.parametrize(
    "limits",
    [
        {"max_batch_tokens": 6},
        pytest.param({}, marks=pytest.mark.soak),
        pytest.param({"speculative_tokens": 2}, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_step_is_told_in_one_copy_before_the_model(
    late: LateDevice, on_cpu: dict[str, list[int]], limits: dict[str, int]
) -> None:
    steps: list[Step] = []
    assert written(late, steps=steps, **limits) == on_cpu
    assert {(step.before, step.uploads) for step in steps} == {(1, 1)}
    # A step of a part of a prompt alone waits for nothing, and the next one comes while it is
    # under way.
    assert {step.waits for step in steps if step.is_sampled} == {1}
    assert {step.waits for step in steps if not step.is_sampled} <= {0}
    assert all(step.is_sampled for step in steps) == ("max_batch_tokens" not in limits)


def test_a_step_that_is_replayed_is_told_in_one_copy(
    late: LateDevice, on_cpu: dict[str, list[int]]
) -> None:
    steps: list[Step] = []
    assert written(late, steps=steps, recorder=late) == on_cpu
    # Two sizes are recorded, each once: what they are padded with is a copy, too.
    assert sorted(step.uploads for step in steps) == [1] * (len(steps) - 2) + [2] * 2
    assert {step.waits for step in steps} == {1}


def test_masks_of_grammars_are_found_while_the_device_has_work(late: LateDevice) -> None:
    requests = [(9, {**DRAWN, "regex": "x"}), (6, {**EDITED, "regex": "x"}), (4, GREEDY)]
    steps: list[Step] = []
    queued: list[int] = []
    found = written(late, requests, steps, note=lambda: queued.append(late.num_queued))
    assert found == written(None, requests)
    assert all(token % 2 for name in "01" for token in found[name])
    assert {(step.before, step.uploads, step.waits) for step in steps} == {(1, 2, 1), (1, 1, 1)}
    assert len(queued) == 2 * 5
    # More than the model's own operations would not be known here; fewer are none of its step.
    assert min(queued) > 20


def test_what_failed_is_told_again(late: LateDevice, on_cpu: dict[str, list[int]]) -> None:
    """Before the device had the changes of the block tables; and in the middle of the model."""
    original, failures = BlockTables.apply, iter([None, None, ArithmeticError("no memory")])

    def apply(tables: BlockTables, changes: Sequence[Tensor]) -> None:
        if changes and (failure := next(failures, None)) is not None:
            raise failure
        original(tables, changes)

    with patch.object(BlockTables, "apply", apply):
        assert written(late, failing=8) == on_cpu
    assert next(failures, "") == ""


def test_entries_of_block_tables_are_told_until_the_device_has_them(late: LateDevice) -> None:
    tables, on_host = BlockTables(3, 5, DEVICE), BlockTables(3, 5, CPU)
    rows = torch.arange(4)
    for writes, is_told in [
        ([(1, 0, [7, 8, 9])], False),
        ([(2, 4, [3])], True),
        ([(1, 2, [5]), (2, 0, [1, 2])], False),
        ([(1, 0, [0, 0]), (3, 1, [4, 6])], True),
    ]:
        for write in writes:
            tables.write(*write)
            on_host.write(*write)
        # A step that fails before `apply` has told them in vain.
        changes = upload(tables.changes(), DEVICE)
        if is_told:
            tables.apply(changes)
            assert tables.changes() == on_host.changes() == ()
            found = tables.select(rows.to(DEVICE), 4)
            assert found.tolist() == on_host.select(rows, 4).tolist()


@pytest.mark.soak
def test_a_buffer_that_is_written_too_early_is_found(
    late: LateDevice, on_cpu: dict[str, list[int]]
) -> None:
    """By the tests above: with one buffer, a step overwrites what the one before has not read."""
    buffer = torch.zeros(4096, dtype=torch.int64)

    def careless(parts: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
        sizes = [len(part) for part in parts]
        torch.cat(list(parts), out=buffer[: sum(sizes)])
        return buffer[: sum(sizes)].to(device, non_blocking=True).split_with_sizes(sizes)

    with patch.object(runner, "upload", careless):
        # Where the host has waited for each step before the next, it does no harm.
        assert written(late) == on_cpu
        # Places of blocks are read where what the sampler is told of the last part stands by now.
        with pytest.raises(AssertionError, match=r"index_copy_.* out of bounds"):
            written(late, max_batch_tokens=6)


def test_a_second_copy_is_found(late: LateDevice) -> None:
    """Without what was told before, the sampler tells the device itself; so does a list."""
    sampler = Sampler(5, DEVICE)
    logits = torch.randn(1, 5).to(DEVICE)
    before = late.uploads, late.waits
    row = runner.SamplingRow(SamplingParams(**EDITED), (1, 2), (), 2)
    assert len(sampler.sample(logits, [row]).token_ids) == 1
    assert (late.uploads - before[0], late.waits - before[1]) == (1, 1)
    assert torch.tensor([3, 4], device=DEVICE).tolist() == [3, 4]
    # The host waits for a copy of memory that may change, and for the values.
    assert (late.uploads - before[0], late.waits - before[1]) == (2, 3)


class Pinned(TorchFunctionMode):
    """Notes which memory is pinned, and what copies to a GPU that is not there read."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[int] = []
        self.copies: list[tuple[bool, bool, str]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.pop("pin_memory", False):
            made = func(*args, **kwargs)
            self.pinned.append(made.data_ptr())
            return made
        if func is Tensor.to:
            is_pinned = args[0].data_ptr() in self.pinned
            self.copies.append((is_pinned, kwargs["non_blocking"], str(args[1])))
            return args[0].clone()
        return func(*args, **kwargs)


def test_a_gpu_reads_pinned_memory() -> None:
    parts = [torch.arange(n) + 10 * n for n in (3, 0, 5)]
    with Pinned() as noted:
        found = upload(parts, torch.device("cuda", 1))
    assert noted.copies == [(True, True, "cuda:1")]
    for one, part in zip(found, parts, strict=True):
        assert_equal(one, part)
        assert one.data_ptr() % 16 == 0
    # On a CPU nothing is copied.
    assert upload(parts, CPU) is parts


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_integers_of_32_bits_lie_side_by_side(count: int) -> None:
    numbers = [(-3) ** n for n in range(count)]
    packed = packed_int32(numbers)
    assert len(packed) == -(-count // 2)
    part = torch.tensor([*packed, 5], dtype=torch.int64)
    assert unpacked_int32(part, count).tolist() == numbers
