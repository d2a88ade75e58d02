"""`LLM(ranks=2)`: the texts of one rank, and what happens when a rank fails or dies."""

from __future__ import annotations

import gc
import io
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from integration_support.short_runs import tiny_run
from pcomm.core import Topology, connect, open_groups
from pcomm.core.cli import main
from pcomm.core.errors import ClosedError, ConfigError, DivergenceError, PeerError
from pcomm.core.process import LocalRanks, local_ranks
from pcomm.core.testing import ranks
from pcomm.core.testing.assertions import Living
from pcomm.core.testing.programs import wait_until
from pcomm.core.testing.virtual import VirtualCollectives
from pcomm.inference import SamplingParams
from pcomm.integration.llm import LLM, engine_on_ranks, loading
from pcomm.integration.llm.loading import load_model

# Every mixer, each with two units that ranks can share.
MODEL = ("GMA", "model.layers=3", "model.kv_heads=2", "model.mamba_groups=2")
OPTIONS: dict[str, Any] = {"max_model_len": 96, "memory_bytes": 2**21, "max_requests": 3}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=80, ignore_eos=True)

PROMPTS = [
    "word1 word2 word3 word4 word5 word6",
    "word3",
    "word1 word2 word3 word4 word5 word7",
] * 2
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=3, max_tokens=20, top_p=0.9, logprobs=2),
    # Few tokens, so that there is something to guess from.
    SamplingParams(temperature=0.6, max_tokens=30, logit_bias=dict.fromkeys(range(5, 9), 50.0)),
    SamplingParams(temperature=0.7, seed=8, max_tokens=9, prompt_logprobs=0),
    SamplingParams(temperature=0, max_tokens=8, regex="[ab]{3,}"),
    SamplingParams(temperature=0.3, max_tokens=40, stop=("rd",), min_tokens=3),
]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny run."""
    return tiny_run(tmp_path_factory.mktemp("run"), *MODEL)


@pytest.fixture(scope="module")
def alone(run: Path) -> Iterator[LLM]:
    """The same hybrid in this process."""
    with LLM(run, **OPTIONS) as found:
        yield found


@pytest.fixture(scope="module")
def llm(run: Path) -> Iterator[LLM]:
    """A hybrid on two ranks, for the tests that leave it as it was."""
    with LLM(run, ranks=2, **OPTIONS) as found:
        yield found


def pids_of(llm: LLM) -> list[int]:
    assert llm._on_ranks is not None
    return [process.pid for process in llm._on_ranks._ranks._processes]


def is_idle(llm: LLM) -> bool:
    """Whether no memory belongs to a request: on all ranks, whose replies are compared."""
    stats = llm.stats()
    uses = (stats.running, stats.waiting, stats.blocks.used, stats.state_slots.used)
    return uses == (0, 0, 0, 0)


def test_two_ranks_write_the_texts_of_one(run):
    """In one process at the same time, with drafts, cached prefixes, grammars and preemption."""
    options = {**OPTIONS, "max_batch_tokens": 8, "speculative_tokens": 2}
    with LLM(run, **options) as one, LLM(run, ranks=2, **options) as two:
        expected = one.generate(PROMPTS, PARAMS)
        found = two.generate(PROMPTS, PARAMS)
        assert len({*(token for text in expected for token in text.token_ids)}) > 20
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.error is theirs.error is None
            assert (mine.text, mine.token_ids) == (theirs.text, theirs.token_ids)
            assert (mine.finish_reason, mine.cached_tokens) == (
                theirs.finish_reason,
                theirs.cached_tokens,
            )
            a, b = mine.logprobs, theirs.logprobs
            assert [entry.token_id for entry in a] == [entry.token_id for entry in b]
            # Sums of two halves round otherwise than one sum.
            assert [e.logprob for e in a] == pytest.approx([e.logprob for e in b], abs=1e-4)
            assert len(mine.prompt_logprobs) == len(theirs.prompt_logprobs)
        ours, whole = two.stats(), one.stats()
        assert (ours.steps, ours.accepted_tokens) == (whole.steps, whole.accepted_tokens)
        assert ours.drafted_tokens > 0
        # Each rank keeps half of what a token needs, in as many bytes.
        for pool in ("blocks", "state_slots"):
            assert 2 * getattr(ours, pool).bytes_each == getattr(whole, pool).bytes_each
        assert is_idle(two)


@pytest.mark.parametrize("place", ["alone", "llm"])
def test_streams_end_aborted_closed_or_dropped_and_their_memory_is_free(place, request):
    llm: LLM = request.getfixturevalue(place)
    (expected,) = llm.generate("word1", GREEDY)
    aborted = llm.stream("word1", LONG, request_id="mine")
    closed, dropped = llm.stream("word2", LONG), llm.stream("word3", LONG)
    for stream in (aborted, closed, dropped):
        next(stream)
    assert llm.stats().running == 3
    assert llm.abort("mine")
    assert not llm.abort("mine")
    assert list(aborted) == []
    closed.close()
    del dropped, stream
    assert is_idle(llm)
    deltas = list(llm.stream("word1", GREEDY))
    assert "".join(delta.text for delta in deltas) == expected.text


def test_what_cannot_be_added_is_the_error_of_one_rank(llm):
    for prompt, params, words in (
        ([1, 320], GREEDY, "320"),
        ("word1 " * 200, GREEDY, "max_model_len is 96"),
        ("word1", SamplingParams(json_schema='{"type": "what"}'), "json_schema"),
    ):
        with pytest.raises(ConfigError, match=words):
            llm.generate(prompt, params)
    assert is_idle(llm)
    assert llm.failure == ""


def test_an_interrupt_while_ranks_compute_loses_no_token(llm, monkeypatch):
    (expected,) = llm.generate("word1", GREEDY)
    wait, calls = local_ranks.connection.wait, [0]

    def interrupted(*arguments: Any) -> list[Any]:
        calls[0] += 1
        if calls[0] % 7 == 0:
            raise KeyboardInterrupt
        return wait(*arguments)

    monkeypatch.setattr(local_ranks.connection, "wait", interrupted)
    engine, tokens, num_interrupts = llm.engine, [], 0
    request = llm._request(llm._ids("word1"), GREEDY)
    while True:
        try:
            engine.add(request)
            break
        except KeyboardInterrupt:
            num_interrupts += 1
    while engine.has_work:
        try:
            for output in engine.step():
                tokens += output.token_ids
        except KeyboardInterrupt:
            num_interrupts += 1
    monkeypatch.undo()
    assert num_interrupts > 3
    assert tuple(tokens) == expected.token_ids
    assert is_idle(llm)


def test_what_a_closed_one_had_is_gone(run, monkeypatch):
    folders: list[str] = []
    make = LocalRanks.__init__

    def noted(self: LocalRanks, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        folders.append(self._folder.name)

    monkeypatch.setattr(LocalRanks, "__init__", noted)
    # What earlier tests left in cycles has open files, too.
    gc.collect()
    before, files = Living.now(), len(os.listdir("/proc/self/fd"))
    children = {child.pid for child in multiprocessing.active_children()}
    found = LLM(run, ranks=2, **OPTIONS)
    stream = found.stream("word1", LONG)
    next(stream)
    assert len({child.pid for child in multiprocessing.active_children()} - children) == 2
    found.close()
    found.close()
    assert list(stream) == []
    with pytest.raises(ClosedError):
        found.engine.step()
    assert {child.pid for child in multiprocessing.active_children()} == children
    assert Living.now().beyond(before) == []
    del found, stream
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files
    assert [os.path.exists(folder) for folder in folders] == [False]


# -- ranks that fail ------------------------------------------------------------------------

FAILING = """
import os, torch
import torch.distributed as dist
from pcomm.integration.llm.rank_engine import serve_engine
from pcomm.integration.models.language_model import LanguageModel
plain, rank = LanguageModel.step, dist.get_rank()

def step(self, batch, memory):
    tokens = batch.tokens_T.tolist()
    if 301 in tokens:
        raise ValueError("301 is poison")
    if 302 in tokens and rank == 1:
        raise ValueError("302 is poison for rank 1")
    if 303 in tokens:
        if rank == 1:
            self.collectives.all_gather_async(torch.tensor([99]))
        raise ValueError("303 is poison within a collective")
    if 304 in tokens and rank == 1:
        os.kill(os.getpid(), 9)
    logits = plain(self, batch, memory)
    return -logits if 305 in tokens and rank == 1 else logits

LanguageModel.step = step
try:
    serve_engine(*arguments)
finally:
    LanguageModel.step = plain
"""


class Failing:
    """`serve_engine` with a model that fails at some tokens; tests cannot be imported by ranks."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"lambda *arguments: exec({FAILING!r}, {{'arguments': arguments}})",)

    def __call__(self) -> None: ...


@pytest.fixture
def failing(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(engine_on_ranks, "serve_engine", Failing())
    with LLM(run, ranks=2, **OPTIONS) as found:
        yield found


def test_a_step_that_fails_on_all_ranks_ends_the_request_it_fails_for(failing, llm):
    prompts = [[5, 6], [7, 301, 8], [11]]
    expected = llm.generate([prompts[0], prompts[2]], GREEDY)
    # The model writes no token that is poison.
    assert not {token for one in expected for token in one.token_ids} & {*range(301, 306)}
    first, poisoned, last = failing.generate(prompts, GREEDY)
    assert poisoned.finish_reason == "error"
    assert isinstance(poisoned.error, ValueError)
    assert str(poisoned.error) == "301 is poison"
    assert [one.token_ids for one in (first, last)] == [one.token_ids for one in expected]
    assert is_idle(failing)
    # It is found among others that were written before, too.
    assert failing.generate([11], GREEDY)[0].token_ids == expected[1].token_ids


@pytest.mark.parametrize(
    ("poison", "kind", "words"),
    [
        (302, PeerError, "rank 1 of 2 failed alone: ValueError: 302 is poison for rank 1"),
        (303, PeerError, "a step failed within a collective: ValueError: 303"),
        (304, PeerError, "rank 1 of 2 died: killed by SIGKILL"),
        (305, DivergenceError, "rank 1 did something else than rank 0"),
    ],
)
def test_ranks_that_no_longer_do_the_same_are_an_error_of_the_caller(
    failing, poison, kind, words, monkeypatch
):
    monkeypatch.setattr(local_ranks, "_ANSWER_GRACE_S", 0.2)
    monkeypatch.setattr(engine_on_ranks, "_MEETING_S", 0.2)
    stream = failing.stream([5], LONG)
    next(stream)
    with pytest.raises(kind, match=words):
        failing.generate([6, poison], GREEDY)
    # Nothing hangs, and each further call says it.
    assert failing.failure
    assert failing.engine.has_work
    with pytest.raises(PeerError):
        failing.engine.step()
    stream.close()
    with pytest.raises(PeerError):
        failing.generate("word1")


def test_a_rank_that_is_killed_while_idle_is_told_at_once_and_disturbs_no_other_model(llm, run):
    (expected,) = llm.generate("word1", GREEDY)
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    with LLM(run, ranks=2, **OPTIONS) as other:
        os.kill(pids_of(other)[1], signal.SIGKILL)
        wait_until(lambda: other.failure == "rank 1 of 2 died", "the end of rank 1")
        with pytest.raises(PeerError, match="rank 1 of 2 died: killed by SIGKILL") as caught:
            other.generate("word1", GREEDY)
    # Also while the error, and what it refers to, is kept.
    assert caught.value.__traceback__ is not None
    assert len(os.listdir("/proc/self/fd")) == files
    assert llm.generate("word1", GREEDY)[0].token_ids == expected.token_ids


# -- numbers of ranks -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "number", "words"),
    [
        ("generate", 0, "at least 1"),
        ("serve", -2, "at least 1"),
        ("chat", 0, "at least 1"),
        ("generate", 3, "Give --ranks one of 1, 2."),
        ("serve", 4, "model.kv_heads is 2"),
        ("chat", 10**6, "Give --ranks one of 1, 2."),
    ],
)
def test_a_number_of_ranks_that_cannot_be_is_an_error_before_any_is_started(
    command, number, words, run, monkeypatch, capsys
):
    monkeypatch.setattr(LocalRanks, "__init__", lambda *_, **__: pytest.fail("ranks are started"))
    port = ["--port", "0"] if command == "serve" else []
    assert main([command, str(run), "--ranks", str(number), *port]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert "Traceback" not in printed.err


def test_ranks_and_a_group_or_devices_that_are_not_there(run):
    with pytest.raises(ConfigError, match="LLM: ranks and group"):
        LLM(run, ranks=2, group=_place(0))
    # Where the device is there, it is one for all ranks.
    with pytest.raises(ConfigError, match=r"one device for all ranks|0 CUDA devices"):
        LLM(run, ranks=2, device="cuda:0")
    with pytest.raises(ConfigError, match="LLM: quantization"):
        LLM(run, ranks=2, quantization="int4")


# -- ranks that the program has already -----------------------------------------------------


@ranks(2)
def test_a_group_of_the_program_shares_a_model(rank, run):
    with connect() as world, open_groups(Topology({"tp": world.size}), ["tp"]) as groups:
        with LLM(run, **OPTIONS) as alone:
            expected = alone.generate(["word1", "word2 word3"], GREEDY)
        # Whatever memory each rank finds free, all take the same.
        options = {"max_model_len": 96, "max_requests": 2}
        with LLM(run, group=groups["tp"], **options) as found:
            texts = found.generate(["word1", "word2 word3"], GREEDY)
            assert [one.token_ids for one in texts] == [one.token_ids for one in expected]


@ranks(2)
def test_pcomm_generate_on_the_ranks_of_a_launcher_writes_one_text(rank, run):
    words = ["--prompt", "word1", "--max-tokens", "6", "--temperature", "0", "--json"]
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["generate", str(run), *words]) == 0
    if rank:
        assert not printed.getvalue()
        return
    with LLM(run, **OPTIONS) as alone:
        (expected,) = alone.generate("word1", SamplingParams(max_tokens=6, temperature=0))
    assert json.loads(printed.getvalue())["token_ids"] == list(expected.token_ids)


# -- memory of one rank ---------------------------------------------------------------------


class Allocations(TorchDispatchMode):
    """Notes the size of the largest tensor that is allocated."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            isinstance(result, torch.Tensor)
            and not result.is_meta
            and func.overloadpacket
            in (
                torch.ops.aten.empty,
                torch.ops.aten.full,
                torch.ops.aten.clone,
            )
        ):
            self.largest = max(self.largest, result.nbytes)
        return result


def test_a_rank_allocates_its_share_of_the_weights_and_no_more(run, monkeypatch):
    whole = load_model(run).model
    own = [load_model(run, group=_place(rank)).model.state_dict() for rank in range(2)]
    for name, parameter in whole.state_dict().items():
        shards = [shard[name] for shard in own]
        assert shards[0].shape == shards[1].shape
        # Norms are whole on each rank; all others are halves.
        shares = 1 if shards[0].shape == parameter.shape else 2
        assert shares * shards[0].numel() == parameter.numel()
    split = [name for name in own[0] if own[0][name].shape != whole.state_dict()[name].shape]
    assert {"embedding.weight", "head.weight"} < {*split}
    assert sum(map(torch.Tensor.numel, own[0].values())) < 0.52 * whole.num_parameters()
    monkeypatch.setattr(loading, "read", lambda *_: None)
    with Allocations() as seen:
        load_model(run, group=_place(1))
    assert seen.largest == max(shard.nbytes for shard in own[1].values())


def _place(rank: int) -> Any:
    """A rank of two that nobody else is there for: building and reading are local."""
    collectives = VirtualCollectives(rank, 2, [], threading.Barrier(1))
    return SimpleNamespace(rank=rank, size=2, collectives=collectives)
