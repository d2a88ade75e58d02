"""Requests through the engine: order, limits, ends, failures and memory."""

import gc
import weakref
from itertools import pairwise
from unittest.mock import Mock, patch

import pytest
import torch

from inference_support.toy_model import ToyModel, expected_tokens
from pcomm.core.errors import ClosedError, ConfigError
from pcomm.inference.engine import allocator
from pcomm.inference.engine.engine import Engine
from pcomm.inference.engine.request import QueueFullError, Request
from pcomm.inference.engine.scheduler import MOST_FAILURES
from pcomm.inference.model import KVSpec, StateSpec
from pcomm.inference.sampling.params import SamplingParams

MODELS = {
    "attention": ToyModel(attention_layers=2, state_layers=0),
    "recurrent": ToyModel(attention_layers=0, state_layers=2),
    "hybrid": ToyModel(),
    "windows": ToyModel(attention_layers=2, state_layers=0, window=2),
}
PROMPTS = [[1], [2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [5] * 13, [10, 9, 8]]


def engine_for(model, **settings):
    given = {"vocabulary": 11, "max_model_len": 64, "block_size": 4}
    given |= {"num_blocks": 40, "num_state_slots": 8, "max_requests": 4}
    return Engine(model, **given | settings)


def greedy(name, prompt, max_tokens, *, priority=0, **params):
    settings = SamplingParams(temperature=0, max_tokens=max_tokens, **params)
    return Request(name, tuple(prompt), settings, priority)


def run(engine):
    """All outputs, with the invariant of both pools after every step."""
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        # The engine would go on with each request alone.
        assert not isinstance(engine.step_error, AssertionError), engine.step_error
        check_pools(engine)
    stats = engine.stats()
    assert stats.blocks.used == stats.state_slots.used == stats.running == stats.waiting == 0
    return outputs


def tokens_of(outputs, name):
    return [token for one in outputs if one.request_id == name for token in one.token_ids]


def failed(outputs):
    return [one.request_id for one in outputs if one.error]


def check_pools(engine):
    stats = engine.stats()
    for pool in (stats.blocks, stats.state_slots):
        assert pool.free + pool.used + pool.cached == pool.size
        assert min(pool.free, pool.used, pool.cached) >= 0


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("max_batch_tokens", [1, 3, 8, 64])
def test_requests_get_the_tokens_that_they_get_alone(kind, max_batch_tokens):
    engine = engine_for(MODELS[kind], max_batch_tokens=max_batch_tokens)
    for number, prompt in enumerate(PROMPTS):
        engine.add(greedy(str(number), prompt, max_tokens=6 + number))
    outputs = run(engine)
    for number, prompt in enumerate(PROMPTS):
        wanted = expected_tokens(MODELS[kind], prompt, 6 + number)
        assert tokens_of(outputs, str(number)) == wanted
        ends = [o.finish_reason for o in outputs if o.request_id == str(number)]
        assert ends == [None] * (len(ends) - 1) + ["length"]


@pytest.mark.parametrize(
    ("kind", "starts"),
    [
        ("attention", [0, 100, 200]),
        *((kind, [*range(0, 257, 64)]) for kind in ("recurrent", "hybrid")),
    ],
)
def test_chunks_of_a_prompt_end_where_kernels_of_recurrent_layers_end_theirs(kind, starts):
    found, model = [], MODELS[kind]

    class Watched(ToyModel):
        def step(self, batch, memory):
            found.append(batch.context_lens[0])
            return super().step(batch, memory)

    engine = engine_for(
        Watched(11, model.attention_layers, model.state_layers),
        max_model_len=400,
        num_blocks=100,
        max_batch_tokens=100,
        prefix_cache=False,
    )
    engine.add(greedy("long", [number % 11 for number in range(300)], max_tokens=1))
    run(engine)
    assert found == starts


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_request_without_blocks_is_computed_again(kind):
    engine = engine_for(MODELS[kind], num_blocks=9)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 9], [3]]
    for number, prompt in enumerate(prompts):
        engine.add(greedy(str(number), prompt, max_tokens=20))
    outputs = run(engine)
    assert engine.stats().preemptions > 0
    for number, prompt in enumerate(prompts):
        assert tokens_of(outputs, str(number)) == expected_tokens(MODELS[kind], prompt, 20)
    # First come, first through: preemption takes the last ones.
    ends = [output.request_id for output in outputs if output.finish_reason]
    assert ends[0] == "0"


def test_what_waits_begins_by_priority_then_in_order():
    engine = engine_for(MODELS["hybrid"], max_requests=1)
    for name, priority in [("a", 1), ("b", 0), ("c", 1), ("d", -1)]:
        engine.add(greedy(name, [1, 2], max_tokens=2, priority=priority))
    ends = [output.request_id for output in run(engine) if output.finish_reason]
    assert ends == ["d", "b", "a", "c"]


def test_text_goes_before_prompts_and_several_prompts_share_a_step():
    engine = engine_for(MODELS["attention"], max_batch_tokens=6)
    engine.add(greedy("text", [1], max_tokens=9))
    engine.step()
    for name in ("long", "short"):
        engine.add(greedy(name, [2] * (8 if name == "long" else 3), max_tokens=1))
    # 1 + 5 of 8; 1 + 3 + 2 of 3; 1 + 1.
    computed = [engine.stats().computed_tokens]
    named = []
    for _ in range(3):
        named.append([output.request_id for output in engine.step()])
        computed.append(engine.stats().computed_tokens)
    assert [b - a for a, b in pairwise(computed)] == [6, 6, 2]
    assert named == [["text"], ["text", "long"], ["text", "short"]]


@pytest.mark.parametrize(
    ("request_", "found"),
    [
        (greedy("a", [], 1), "an empty prompt"),
        (greedy("a", [11], 1), r"token ids \[11\] in the prompt and a vocabulary of 11"),
        (greedy("a", [-1], 1), r"token ids \[-1\]"),
        (greedy("a", [1] * 64, 1), "64 tokens, and max_model_len is 64"),
        (greedy("a", [1] * 40, 20), "up to 60 tokens need 15 KV blocks, and num_blocks is 14"),
        (greedy("a", [1], 1, stop=("x",)), "stop, and an engine without a tokenizer"),
        (greedy("a", [1], 1, grammar="start: A"), "grammar, and an engine without a tokenizer"),
        (greedy("a", [1], 1, logit_bias={11: 1.0}), r"token ids \[11\]"),
        (greedy("known", [1], 1), "a request of this name that is under way"),
        (greedy("a", [1], 1, priority=None), "priority None"),
        (greedy("a", [1], 1, priority=True), "priority True"),
        (greedy(7, [1], 1), "a request_id of type int"),
        (greedy("a", [1, 2.0], 1), "2.0 of type float in the prompt"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(request_, found):
    engine = engine_for(MODELS["hybrid"], num_blocks=14)
    engine.add(greedy("known", [1], 1))
    with pytest.raises(ConfigError, match=found) as error:
        engine.add(request_)
    assert error.value.fix
    assert engine.stats().waiting == 1
    assert [output.request_id for output in run(engine)] == ["known"]


@pytest.mark.parametrize(
    ("kind", "settings", "prompt", "most", "written"),
    [
        # 57 tokens, of which the last one is not computed: 56 are 14 blocks.
        ("hybrid", {"num_blocks": 14, "num_state_slots": 1}, [1] * 40, 17, 17),
        # Up to the longest context.
        ("hybrid", {"max_model_len": 10}, [1] * 7, 50, 3),
        # A pool that a model does not need may be empty.
        ("recurrent", {"num_blocks": 0}, [1, 2], 3, 3),
    ],
)
def test_a_request_at_a_limit_runs(kind, settings, prompt, most, written):
    engine = engine_for(MODELS[kind], **settings)
    engine.add(greedy("a", prompt, most))
    outputs = run(engine)
    assert tokens_of(outputs, "a") == expected_tokens(MODELS[kind], prompt, written)
    assert outputs[-1].finish_reason == "length"


def test_a_full_queue_refuses_and_takes_again_once_there_is_room():
    engine = engine_for(MODELS["hybrid"], max_queued=2, max_requests=1)
    engine.add(greedy("a", [1], 2))
    engine.add(greedy("b", [1], 2))
    with pytest.raises(QueueFullError, match="2 requests wait, and max_queued is 2"):
        engine.add(greedy("c", [1], 2))
    engine.step()
    engine.add(greedy("c", [1], 2))
    assert {output.request_id for output in run(engine)} == {"a", "b", "c"}


class NoStep:
    def memory_specs(self):
        return []


@pytest.mark.parametrize(
    ("model", "settings", "found"),
    [
        (torch.nn.Linear(3, 3), {}, r"a Linear without memory_specs\(\) and step\(\)"),
        (NoStep(), {}, r"a NoStep without step\(\)"),
        (ToyModel, {}, "the class ToyModel"),
        *(
            (MODELS["hybrid"], {name: wrong}, f"Engine: {name}")
            for name, wrong in [
                *((name, 0) for name in ("num_blocks", "num_state_slots", "block_size")),
                *(("max_requests", 0), ("max_batch_tokens", 0), ("max_model_len", 1)),
                *(("speculative_tokens", -1), ("max_queued", True), ("vocabulary", 1.5)),
                *(("prefix_cache", "x"), ("batch_invariant", 1), ("eos_ids", 3)),
                *(("eos_ids", "ab"), ("eos_ids", (2, None)), ("eos_ids", (True,))),
            ]
        ),
    ],
)
def test_an_object_that_is_no_model_and_numbers_that_cannot_run_are_refused(model, settings, found):
    with pytest.raises(ConfigError, match=found) as caught:
        engine_for(model, **settings)
    assert settings or "step(batch, memory)" in caught.value.why


FP32 = torch.float32
WRONG_SPECS = [
    (None, "memory_specs: a NoneType"),
    ("attention", "memory_specs: a str"),
    (KVSpec(1, 1, FP32), "memory_specs: a KVSpec"),
    ({"layer": None}, "memory_specs: a dict"),
    ([None, "attention"], "layer 1 of memory_specs: a str"),
    ([KVSpec(0, 1, FP32)], "heads = 0"),
    ([KVSpec(1, -1, FP32)], "head_dim = -1"),
    ([KVSpec(1, 2.0, FP32)], "head_dim = 2.0"),
    ([KVSpec(True, 2, FP32)], "heads = True"),
    ([KVSpec(1, 1, FP32, value_dim=0)], "value_dim = 0"),
    ([KVSpec(1, 1, FP32, value_dim=1.0)], "value_dim = 1.0"),
    ([KVSpec(1, None, FP32)], "head_dim = None"),
    ([None, KVSpec(1, 1, FP32, window=0)], "layer 1 of memory_specs: window = 0"),
    ([KVSpec(1, 1, FP32, window=4.0)], "window = 4.0"),
    ([KVSpec(1, 1, FP32, window=True)], "window = True"),
    ([KVSpec(1, 1, "bfloat16")], "dtype = 'bfloat16'"),
    ([KVSpec(1, 1, torch.int32)], "KVSpec.dtype = torch.int32"),
    ([KVSpec(1, 1, torch.complex64)], "KVSpec.dtype = torch.complex64"),
    ([StateSpec({"state": (1,)}, {})], "'state' has a shape and no dtype"),
    ([StateSpec({}, {"state": FP32})], "'state' has a dtype and no shape"),
    ([StateSpec([(1,)], {})], "shapes of its StateSpec is a list"),
    ([StateSpec({"state": (1,)}, FP32)], "dtypes of its StateSpec is a dtype"),
    ([StateSpec({"state": 4}, {"state": FP32})], "shape 4 of tensor 'state'"),
    ([StateSpec({"state": (-1,)}, {"state": FP32})], r"shape \(-1,\)"),
    ([StateSpec({"state": (1,)}, {"state": float})], r"dtypes\['state'\] = <class 'float'>"),
]


@pytest.mark.parametrize(("specs", "found"), WRONG_SPECS, ids=lambda one: str(one)[:30])
def test_a_declaration_of_memory_that_cannot_be_allocated_is_refused(specs, found):
    class Wrong:
        def memory_specs(self):
            return specs

        def step(self, batch, memory):
            raise AssertionError

    with pytest.raises(ConfigError, match=found) as caught:
        engine_for(Wrong())
    assert "memory_specs" in caught.value.asked


def test_aborted_requests_leave_at_once_also_while_they_wait():
    engine = engine_for(MODELS["hybrid"], max_requests=1, prefix_cache=False)
    for name in ("runs", "waits", "goes on"):
        engine.add(greedy(name, [1, 2, 3], 5))
    engine.step()
    assert engine.abort("waits")
    assert engine.stats().waiting == 1
    assert engine.abort("runs")
    stats = engine.stats()
    assert (stats.blocks.used, stats.state_slots.used, stats.running) == (0, 0, 0)
    assert not engine.abort("runs")
    assert not engine.abort("unknown")
    assert {output.request_id for output in run(engine)} == {"goes on"}
    # A name is free again once its request has ended.
    engine.add(greedy("runs", [1], 1))
    assert engine.has_work


def test_stop_tokens_end_a_text():
    model = MODELS["hybrid"]
    written = expected_tokens(model, [3, 1], 12)
    own, other = written[4], next(t for t in written[:4] if t != written[4])
    first = {token: written.index(token) + 1 for token in (own, other)}
    engine = engine_for(model, eos_ids=(own,))
    engine.add(greedy("eos", [3, 1], 12))
    engine.add(greedy("both", [3, 1], 12, stop_token_ids=(other,)))
    engine.add(greedy("ignored", [3, 1], 12, ignore_eos=True))
    outputs = run(engine)
    assert tokens_of(outputs, "eos") == written[: first[own]]
    assert tokens_of(outputs, "both") == written[: min(first.values())]
    assert tokens_of(outputs, "ignored") == written
    ends = {output.request_id: output.finish_reason for output in outputs if output.finish_reason}
    assert ends == {"eos": "stop", "both": "stop", "ignored": "length"}


class Letters:
    """Token 0 is "a", and so on; no token ends a text."""

    eos_ids = ()

    def decode(self, ids):
        return "".join(chr(ord("a") + token) for token in ids)


@pytest.mark.parametrize(
    "settings", [{}, {"max_batch_tokens": 3}, {"num_blocks": 7, "max_batch_tokens": 2}]
)
def test_log_probabilities_of_the_prompt_come_once_whole(settings):
    model = MODELS["hybrid"]
    engine = engine_for(model, **settings)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    # What the cache has is computed again where its logits are asked for.
    for name in ("first", "second"):
        engine.add(greedy(name, prompt, 10, prompt_logprobs=2, logprobs=0))
    outputs = run(engine)
    for name in ("first", "second"):
        own = [output for output in outputs if output.request_id == name]
        (found,) = [output.prompt_logprobs for output in own if output.prompt_logprobs]
        assert found is own[0].prompt_logprobs
        assert [entry.token_id for entry in found] == prompt[1:]
        for length, entry in enumerate(found, start=1):
            best = expected_tokens(model, prompt[:length], 1)[0]
            assert next(iter(entry.top)) == best
        written = [entry.token_id for output in own for entry in output.logprobs]
        assert written == tokens_of(outputs, name)
    assert engine.stats().cached_tokens == 0
    assert engine.stats().preemptions == (settings.get("num_blocks") == 7)


class Failing:
    """A toy model whose step raises when it meets a token, or as often as it is told to."""

    def __init__(self, model, *, token=None, times=0, error=RuntimeError):
        self.model, self.token, self.times, self.error = model, token, times, error

    def memory_specs(self):
        return self.model.memory_specs()

    def step(self, batch, memory):
        # Memory is written before it fails, as a kernel may that runs out of memory half way.
        logits = self.model.step(batch, memory)
        if self.token in batch.tokens_T.tolist() or self.times:
            self.times -= bool(self.times)
            raise self.error("broken")
        return logits


@pytest.mark.parametrize("kind", MODELS)
def test_a_failing_step_ends_the_request_that_it_fails_for(kind):
    engine = engine_for(Failing(MODELS[kind], token=10), speculative_tokens=2)
    prompts = {"good": [1, 2, 3, 1, 2], "bad": [4, 10], "also good": [5, 6, 7, 8]}
    lengths = {}
    for name, prompt in prompts.items():
        written = expected_tokens(MODELS[kind], prompt, 8)
        lengths[name] = (written.index(10) if 10 in written else 8) or 1
        engine.add(greedy(name, prompt, lengths[name]))
    outputs = run(engine)
    (bad,) = [output for output in outputs if output.error]
    assert (bad.request_id, bad.finish_reason, str(bad.error)) == ("bad", "error", "broken")
    for name in ("good", "also good"):
        wanted = expected_tokens(MODELS[kind], prompts[name], lengths[name])
        assert tokens_of(outputs, name) == wanted


def test_requests_that_fail_only_together_end():
    class OnlyAlone(Failing):
        def step(self, batch, memory):
            self.times = int(batch.num_requests > 1)
            return super().step(batch, memory)

    engine = engine_for(OnlyAlone(MODELS["hybrid"]))
    for name in "ab":
        engine.add(greedy(name, [1, 2], 40))
    outputs = run(engine)
    assert sorted(failed(outputs)) == ["a", "b"]
    # Each step together that failed was followed by one alone.
    assert len(tokens_of(outputs, "a")) == MOST_FAILURES
    # The engine goes on: also behind requests of which each fails, or leaves in between.
    model = Failing(MODELS["hybrid"], times=1000)
    engine = engine_for(model)
    for name in "abcdef":
        engine.add(greedy(name, [1, 2], 3))
    assert sorted(failed(run(engine))) == list("abcdef")
    model.times = 1
    for name in ("leaves", "stays"):
        engine.add(greedy(name, [1, 2], 3))
    assert engine.step() == []
    assert engine.abort("leaves")
    assert tokens_of(run(engine), "stays") == expected_tokens(model.model, [1, 2], 3)


def prompt_without(token, max_tokens):
    """A prompt and the text that follows it, none of which has the token."""
    return next(
        (prompt, written)
        for prompt in ([number, 2, other] for number in range(10) for other in range(10))
        if token not in (written := expected_tokens(MODELS["hybrid"], prompt, max_tokens))
    )


def test_a_suspect_runs_alone_until_it_is_past_the_tokens_that_failed():
    engine = engine_for(Failing(MODELS["hybrid"], token=10), max_batch_tokens=8)
    # Of three chunks, of which the last one fails.
    engine.add(greedy("bad", [*[1] * 20, 10, 1], 2))
    prompt, written = prompt_without(10, 12)
    engine.add(greedy("good", prompt, 12))
    outputs = run(engine)
    assert failed(outputs) == ["bad"]
    assert tokens_of(outputs, "good") == written


def test_failures_that_another_request_has_caused_do_not_count():
    engine = engine_for(Failing(MODELS["hybrid"], token=10), prefix_cache=False)
    prompt, written = prompt_without(10, 12)
    engine.add(greedy("good", prompt, 12))
    outputs = engine.step()
    names = [f"bad {number}" for number in range(MOST_FAILURES + 2)]
    for name in names:
        engine.add(greedy(name, [4, 10], 2))
        while name not in {output.request_id for output in outputs}:
            outputs += engine.step()
    outputs += run(engine)
    assert failed(outputs) == names
    assert tokens_of(outputs, "good") == written


@pytest.mark.parametrize("kind", MODELS)
def test_an_interrupt_passes_and_nothing_is_lost(kind):
    model = Failing(MODELS[kind], error=KeyboardInterrupt)
    engine = engine_for(model, speculative_tokens=2)
    engine.add(greedy("a", [1, 2, 1, 2, 1], 9))
    outputs = []
    for _ in range(3):
        outputs += engine.step()
        model.times = 1
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        check_pools(engine)
    outputs += run(engine)
    assert tokens_of(outputs, "a") == expected_tokens(MODELS[kind], [1, 2, 1, 2, 1], 9)


class Grammar:
    """Allows all tokens, until it breaks."""

    def __init__(self, *, masks=99, accepts=99):
        self.masks, self.accepts = masks, accepts
        self.is_finished = False

    def allowed_words(self):
        self.masks -= 1
        if self.masks < 0:
            raise ValueError("no mask")
        return torch.tensor([-1], dtype=torch.int32)

    def accept(self, token_id):
        self.accepts -= 1
        if self.accepts < 0:
            raise ValueError("not allowed")


@pytest.mark.parametrize("grammar", [Grammar(masks=2), Grammar(accepts=2)])
def test_a_broken_grammar_ends_its_request_alone(grammar):
    model = MODELS["hybrid"]
    engine = engine_for(model, tokenizer=Letters(), speculative_tokens=2)
    with patch.object(engine._grammars, "compile", return_value=Mock(begin=lambda: grammar)):
        engine.add(greedy("grammar", [1, 2, 1, 2], 9))
    engine.add(greedy("free", [3, 4], 9))
    outputs = run(engine)
    assert tokens_of(outputs, "grammar") == expected_tokens(model, [1, 2, 1, 2], 2)
    assert failed(outputs) == ["grammar"]
    assert tokens_of(outputs, "free") == expected_tokens(model, [3, 4], 9)
    # It gets no drafts, whatever repeats.
    assert engine.stats().drafted_tokens == 0


def test_no_draft_needs_more_places_than_the_request_may_have():
    class Bounded(ToyModel):
        def step(self, batch, memory):
            # The last of 25 tokens is written and never computed.
            assert batch.positions_T.max() < 24
            return super().step(batch, memory)

    # Of two tokens, so that the last ones stood there before.
    sizes = {"vocabulary": 2, "max_model_len": 25, "num_blocks": 40}
    engine = engine_for(Bounded(2), **sizes, speculative_tokens=4)
    for length in range(16, 24):
        engine.add(greedy("a", ([0, 1, 1] * 8)[:length], 50))
        assert run(engine)[-1].error is None
    assert engine.stats().drafted_tokens > 20


def test_requests_that_decode_come_first():
    # Noted and not asserted within the step: the engine would compute each request alone.
    seen = []

    class Ordered(ToyModel):
        def step(self, batch, memory):
            news = [stop - start for start, stop in pairwise(batch.cu_seqlens)]
            decodes = [
                new == 1 and before > 0
                for new, before in zip(news, batch.context_lens, strict=True)
            ]
            seen.append((decodes, batch.num_decodes))
            return super().step(batch, memory)

    engine = engine_for(Ordered())
    engine.add(greedy("long", [1] * 9, 5))
    engine.step()
    engine.add(greedy("late", [2], 5, priority=-1))
    engine.add(greedy("later", [3, 4], 5))
    run(engine)
    # The prefix cache leaves one token of a prompt, behind a request that begins before it.
    engine = engine_for(Ordered(state_layers=0))
    engine.add(greedy("cached", [1] * 9, 1))
    run(engine)
    engine.add(greedy("first", [2] * 3, 2))
    engine.add(greedy("again", [1] * 9, 2))
    assert [output.cached_tokens for output in engine.step()] == [8, 0]
    assert seen[-1] == ([True, False], 1)
    for decodes, num_decodes in seen:
        assert decodes == sorted(decodes, reverse=True)
        assert num_decodes == sum(decodes)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda logits: logits[:, :-1], "logits of shape [1, 10]"),
        (lambda logits: logits[0], "logits of shape [11]"),
        (lambda logits: logits.long(), "logits of torch.int64"),
        (lambda logits: logits.tolist(), "a list"),
        (lambda logits: None, "a NoneType"),
    ],
)
def test_a_result_that_is_no_logits_is_named(change, found):
    class Wrong(ToyModel):
        def step(self, batch, memory):
            return change(super().step(batch, memory))

    engine = engine_for(Wrong())
    engine.add(greedy("a", [1], 1))
    (output,) = engine.step()
    assert isinstance(output.error, ConfigError)
    assert output.error.found == found
    assert "Wrong.step" in output.error.asked


class NotNumbers(ToyModel):
    """A toy model that counts: n + 1 comes behind n, and what comes behind 10 is no number."""

    def step(self, batch, memory):
        tokens = batch.tokens_T[batch.logits_rows]
        logits = super().step(batch, memory).zero_()
        logits.scatter_(1, ((tokens + 1) % 11)[:, None], 1.0)
        logits[tokens == 10] = torch.nan
        return logits


@pytest.mark.parametrize("drafts", [0, 1, 2, 3, 4, 8])
@pytest.mark.parametrize("kind", MODELS)
def test_logits_that_are_not_numbers_end_their_request_alone(kind, drafts):
    layers = MODELS[kind]
    model = NotNumbers(11, layers.attention_layers, layers.state_layers)
    engine = engine_for(model, speculative_tokens=drafts, max_requests=5)
    # Drafts come from the prompt, and the last ones of a step stand behind the last right token.
    prompts = {"now": [4, 10], "long": [*range(11), 0, 1], "short": [5], "with text": [8]}
    for name, prompt in prompts.items():
        engine.add(greedy(name, prompt, 20, logprobs=0 if name == "with text" else None))
    engine.add(greedy("ends before", [*range(11), 0, 1], 9))
    engine.add(greedy("stops before", [*range(11), 0, 1], 20, stop_token_ids=(10,)))
    outputs = run(engine)
    assert set(failed(outputs)) == set(prompts)
    errors = [one.error for one in outputs if one.error]
    assert all("not numbers: the largest is nan" in error.found for error in errors)
    for name, prompt in prompts.items():
        assert tokens_of(outputs, name) == list(range(prompt[-1] + 1, 11))
    for name in ("ends before", "stops before"):
        assert tokens_of(outputs, name) == list(range(2, 11))
    assert (engine.stats().accepted_tokens > 0) == (drafts > 0)


def test_two_engines_in_one_process_know_nothing_of_each_other():
    engines = {kind: engine_for(model) for kind, model in MODELS.items()}
    outputs = {kind: [] for kind in engines}
    for engine in engines.values():
        engine.add(greedy("same name", [1, 2, 3], 7))
    while any(engine.has_work for engine in engines.values()):
        for kind, engine in engines.items():
            outputs[kind] += engine.step()
    for kind, model in MODELS.items():
        assert tokens_of(outputs[kind], "same name") == expected_tokens(model, [1, 2, 3], 7)


def test_a_begin_that_was_computed_before_is_not_computed_again():
    model = MODELS["attention"]
    engine = engine_for(model)
    engine.add(greedy("first", [1, 2, 3, 4, 5, 6, 7, 8, 9], 1))
    run(engine)
    before = engine.stats().computed_tokens
    engine.add(greedy("second", [1, 2, 3, 4, 5, 6, 7, 8, 10, 3], 1))
    (output,) = run(engine)
    assert output.cached_tokens == 8
    assert engine.stats().computed_tokens - before == 2
    assert list(output.token_ids) == expected_tokens(model, [1, 2, 3, 4, 5, 6, 7, 8, 10, 3], 1)


def test_closing_frees_the_pools():
    engine = engine_for(MODELS["hybrid"])
    engine.add(greedy("a", [1, 2, 3], 9))
    engine.step()
    pools = [engine._allocator.pools.memories[0].keys, engine._allocator.pools._states[0]]
    tensors = [weakref.ref(pool) for pool in pools]
    del pools
    engine.close()
    engine.close()
    gc.collect()
    assert [tensor() for tensor in tensors] == [None, None]
    stats = engine.stats()
    assert (stats.blocks.free, stats.state_slots.free) == (40, 8)
    assert not engine.has_work
    with pytest.raises(ClosedError, match=r"Engine\.step: a closed engine"):
        engine.step()
    with pytest.raises(ClosedError, match=r"Engine\.add"):
        engine.add(greedy("a", [1], 1))


@pytest.mark.parametrize("kind", MODELS)
def test_continuations_of_one_prompt_that_arrive_together_compute_it_once(kind):
    model, prompt = MODELS[kind], [token % 7 for token in range(19)]
    with patch.multiple(allocator, STATE_CHUNK=4):
        engine = engine_for(model, max_batch_tokens=24)
    for name in ("a", "b", "c"):
        engine.add(greedy(name, prompt, 3))
    # It shares less than half of its own tokens, so it does not wait.
    engine.add(greedy("d", [*prompt[:4], *[8] * 9], 3))
    engine.step()
    stats = engine.stats()
    # All but the rest of "a" behind the last copy of its state, and of "d".
    assert (stats.running, stats.waiting) == (2, 2)
    outputs = run(engine)
    for name in ("b", "c"):
        own = [output for output in outputs if output.request_id == name]
        assert own[0].cached_tokens == 16
        assert tokens_of(outputs, name) == expected_tokens(model, prompt, 3)
    # An end or a preemption of the first one lets the others begin.
    engine.add(greedy("e", [9] * 12, 3))
    engine.add(greedy("f", [9] * 12, 3))
    with patch.object(engine._scheduler, "_max_batch_tokens", 4):
        engine.step()
    assert engine.abort("e")
    assert tokens_of(run(engine), "f") == expected_tokens(model, [9] * 12, 3)
    assert engine._allocator._in_flight == {}
