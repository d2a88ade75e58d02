"""`LLM`: texts from Python, each the same however they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from integration_support.short_runs import PATTERNS, tiny_run
from pcomm.core.errors import ClosedError, ConfigError, UnsupportedError
from pcomm.inference import KVSpec, SamplingParams, StateSpec
from pcomm.integration import plan_sequences
from pcomm.integration.commands.conversion import run_to_directory
from pcomm.integration.llm import LLM, load_model
from pcomm.integration.llm.engine_size import memory_size, rank_bytes

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MEMORY = 2**21


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`run(name)`: the folder of a tiny run, made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tiny_run(tmp_path_factory.mktemp(name), PATTERNS[name])
        return made[name]

    return get


@pytest.fixture(scope="module")
def llm(run: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(run("hybrid"), memory_bytes=MEMORY, max_model_len=128, max_queued=4) as found:
        yield found


@pytest.mark.parametrize("name", PATTERNS)
def test_it_writes_the_likeliest_tokens(name, run):
    alone = load_model(run(name))
    tokens = list(prompt := alone.prompt_ids("word1 word2"))
    for _ in range(GREEDY.max_tokens):
        sequence = plan_sequences(alone.model, (0, len(tokens)))
        tokens.append(int(alone.model(torch.tensor(tokens), sequence)[-1].argmax()))
    expected = tokens[len(prompt) :]
    with LLM(run(name), memory_bytes=MEMORY, max_model_len=128) as llm:
        (found,) = llm.generate("word1 word2", GREEDY)
        assert list(found.token_ids) == expected
        assert found.text == llm.loaded.tokenizer.decode(expected)
        assert found.finish_reason == "length"
        assert found.prompt_ids == tuple(prompt)


def test_a_hugging_face_directory_writes_what_the_run_it_came_from_writes(run, tmp_path):
    run_to_directory(run("gpt"), tmp_path / "exported")
    options = {"memory_bytes": MEMORY, "max_model_len": 64}
    with LLM(run("gpt"), **options) as here, LLM(tmp_path / "exported", **options) as there:
        expected, found = (llm.generate("word1 word2", GREEDY)[0] for llm in (here, there))
        assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
        assert there.loaded.tokenizer.eos_ids == here.loaded.tokenizer.eos_ids
    # What the directory says of its context, where nothing else is said.
    with LLM(tmp_path / "exported", memory_bytes=MEMORY) as there:
        assert there.max_model_len == 64


def test_prompts_together_streamed_and_alone_give_the_same_texts(llm):
    # More prompts than wait at once, of several lengths, as text and as token ids.
    prompts = ["word1 " * count for count in range(1, 12)]
    params = [SamplingParams(seed=seed, max_tokens=5 + seed) for seed in range(len(prompts))]
    together = llm.generate(prompts, params)
    assert len({one.text for one in together}) > 5
    for prompt, settings, expected in zip(prompts, params, together, strict=True):
        ids = llm.loaded.prompt_ids(prompt)
        deltas = list(llm.stream(ids, settings))
        assert tuple(token for delta in deltas for token in delta.token_ids) == expected.token_ids
        assert "".join(delta.text for delta in deltas) == expected.text
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == expected.finish_reason
    assert llm.stats().blocks.used == llm.stats().state_slots.used == 0


def test_streams_that_are_read_in_turn_do_not_disturb_each_other(llm):
    (first,), (second,) = llm.generate("word1", GREEDY), llm.generate("word2 word3", GREEDY)
    streams = [llm.stream("word1", GREEDY), llm.stream("word2 word3", GREEDY)]
    found: list[list[int]] = [[], []]
    for _ in range(6):
        for place, stream in enumerate(streams):
            found[place] += next(stream).token_ids
    # A third one begins and ends in between.
    assert llm.generate("word1", GREEDY)[0].token_ids == first.token_ids
    for place, stream in enumerate(streams):
        found[place] += [token for delta in stream for token in delta.token_ids]
    assert [tuple(tokens) for tokens in found] == [first.token_ids, second.token_ids]


def test_a_chat_is_the_template_and_stops_before_the_next_question(llm):
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "word1"}]
    ids, settings = llm.chat_prompt(messages, GREEDY)
    text = "system: short\nuser: word1\nassistant:"
    assert ids == llm.loaded.tokenizer.encode(text)
    assert settings.stop == ("\nuser:", "\nsystem:")
    answer = llm.chat(messages, GREEDY)
    assert answer.token_ids == llm.generate([ids], settings)[0].token_ids


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["gpt", "hybrid"])
def test_with_batch_invariant_a_prompt_has_the_bits_that_it_has_alone(name, dtype, run):
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0, seed=3)
    prompts = ["word1 " * count for count in (1, 2, 40, 100, 7)]
    options: dict[str, Any] = {"memory_bytes": 2**24, "batch_invariant": True, "dtype": dtype}
    with LLM(run(name), max_model_len=300, **options) as llm:
        together = llm.generate(prompts, params)
        for prompt, expected in zip(prompts, together, strict=True):
            (alone,) = llm.generate(prompt, params)
            assert [(one.token_id, one.logprob) for one in alone.logprobs] == [
                (one.token_id, one.logprob) for one in expected.logprobs
            ]
        assert llm.engine.stats().cached_tokens == 0
    # As `pcomm generate` writes it, whose engine has other sizes.
    with LLM(run(name), max_model_len=220, max_requests=1, **options) as llm:
        assert llm.generate(prompts[3], params)[0].token_ids == together[3].token_ids


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"quantization": "int8"}, "quantization='int8'"),
        ({"device": torch.device("cuda")}, "device='cuda'"),
        ({"ranks": 3}, "3 ranks"),
        ({"dtype": "float16"}, "a weight of torch.float16"),
        ({"speculative_tokens": 2}, "speculative_tokens=2"),
        ({"max_batch_tokens": 318}, "max_batch_tokens=318 and max_requests=64"),
    ],
)
def test_what_cannot_be_batch_invariant_is_refused(options, told, run):
    wanted: dict[str, Any] = {"memory_bytes": 2**24, "max_model_len": 64, "batch_invariant": True}
    with pytest.raises((ConfigError, UnsupportedError), match="batch_invariant=True") as caught:
        LLM(run("gpt"), **wanted, **options)
    assert told in str(caught.value)
    if "max_batch_tokens" in options:
        LLM(run("gpt"), **wanted, max_batch_tokens=319).close()


def test_experts_are_not_batch_invariant(tmp_path):
    folder = tiny_run(tmp_path, "A", "model.experts=4")
    with pytest.raises(UnsupportedError, match="a model with experts"):
        load_model(folder, batch_invariant=True)


def test_a_prompt_without_text_begins_a_document(llm):
    (end,) = llm.loaded.tokenizer.eos_ids
    assert llm.generate("", GREEDY)[0].prompt_ids == (end,)


def test_a_grammar_binds_a_run_trained_here(llm):
    pytest.importorskip("llguidance")
    params = SamplingParams(regex="[ab]{8}", max_tokens=40)
    texts = [one.text for one in llm.generate(["word1"] * 3, params)]
    assert all(len(text) == 8 and set(text) <= set("ab") for text in texts)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([10**6], "vocabulary"),
        ([], "empty prompt"),
        ("word " * 500, "max_model_len is 128"),
        ("\ud800", "surrogate"),
    ],
)
def test_a_prompt_that_cannot_be_continued_leaves_nothing_behind(llm, prompt, message):
    with pytest.raises(ConfigError, match=message):
        llm.generate(["word1", prompt, "word2"], GREEDY)
    assert (llm.stats().running, llm.stats().waiting) == (0, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(None), "LLM: prompt: None, a NoneType"),
        (lambda llm: llm.generate([None]), "LLM: prompt: None, a NoneType"),
        (lambda llm: llm.generate(3), "LLM: prompt: 3, a int"),
        (lambda llm: llm.generate(b"a"), "LLM: prompt: b.a., a bytes"),
        (lambda llm: llm.generate(torch.tensor([1, 2])), "a Tensor"),
        (lambda llm: llm.generate(["a", b"b"]), "LLM: prompt: b'b', a bytes"),
        (lambda llm: llm.generate("a", {"max_tokens": 3}), "LLM: params: .*, a dict"),
        (lambda llm: llm.generate(["a"], ["b"]), "LLM: params: 'b', a str"),
        (lambda llm: llm.generate(["a", "b", "c"], [GREEDY] * 2), "2 settings for 3 prompts"),
        (lambda llm: next(llm.stream("a", 5)), "LLM: params: 5, a int"),
        (lambda llm: llm.chat("hi"), "LLM.chat: messages: hi\n"),
        (lambda llm: llm.chat([]), r"LLM.chat: messages: \[\]\n"),
        (lambda llm: llm.chat(["hi"]), "LLM.chat: messages: message 0: 'hi'"),
        (lambda llm: llm.chat([{"role": 3}]), "message 0: {'role': 3}"),
        (lambda llm: llm.chat([{"role": "user", "content": 3}]), "message 0: {'role'"),
        (lambda llm: llm.chat([{"role": "user", "content": "a"}], {}), "LLM: params: {}, a dict"),
    ],
)
def test_what_is_no_prompt_or_setting_is_an_error_of_ours(call, message, llm):
    with pytest.raises(ConfigError, match=message):
        call(llm)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "EMPTY"}, "neither a checkpoint of a run"),
        ({"path": "EMPTY/nowhere"}, "no such folder"),
        ({"dtype": "bfloat15"}, r"'bfloat15'[\s\S]*Did you mean 'bfloat16'"),
        ({"memory_bytes": 100}, "memory_bytes"),
        ({"max_model_len": 0}, "max_model_len"),
    ],
)
def test_bad_arguments_name_the_argument(options, message, run, tmp_path):
    path = options.get("path", str(run("hybrid"))).replace("EMPTY", str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        LLM(**{**options, "path": path})


def test_a_closed_one_says_so(run):
    with LLM(run("hybrid"), memory_bytes=MEMORY, max_model_len=64) as llm:
        stream = llm.stream("word1", GREEDY)
        next(stream)
    assert list(stream) == []
    with pytest.raises(ClosedError, match="closed LLM"):
        llm.generate("word1")


def test_the_dtype_is_that_of_all_weights(run):
    kinds = {
        dtype: load_model(run("gpt"), dtype=dtype).model.embedding.weight.dtype
        for dtype in (None, torch.bfloat16, torch.float64)
    }
    assert kinds == {
        None: torch.float32,
        torch.bfloat16: torch.bfloat16,
        torch.float64: torch.float64,
    }


@pytest.mark.parametrize(("name", "fitting"), [("gpt", "1, 2"), ("mamba", "1"), ("hybrid", "1, 2")])
def test_ranks_that_cannot_share_a_model_are_told_which_can(name, fitting, run):
    group: Any = SimpleNamespace(size=3)
    with pytest.raises(ConfigError, match=r"3, and .* is no multiple of 3") as raised:
        load_model(run(name), group=group)
    assert f"{run(name)}: --ranks 3" in str(raised.value)
    assert f"Give --ranks one of {fitting}." in str(raised.value)
    assert "parallel.tp" not in str(raised.value)


KV = KVSpec(heads=2, head_dim=8, dtype=torch.float32)  # 2,048 bytes a block of 16 tokens
STATE = StateSpec({"state": (4, 64)}, {"state": torch.float32})  # 1,024 bytes


@pytest.mark.parametrize(
    ("specs", "budget", "expected"),
    [
        ([KV], 4 * 2048, (4, 1, 4 * 2048)),
        ([KV], 4 * 2048 + 2047, (4, 1, 4 * 2048)),
        # No more than all requests together can fill.
        ([KV, None], 10**9, (12, 1, 12 * 2048)),
        ([STATE], 1024, (1, 1, 1024)),
        ([STATE], 10**9, (1, 6, 6 * 1024)),
        # One request of the longest kind, which leaves no room for a snapshot.
        ([KV, STATE], 4 * 2048 + 1024, (4, 1, 4 * 2048 + 1024)),
        ([KV, STATE], 10**9, (12, 6, 12 * 2048 + 6 * 1024)),
    ],
)
def test_pools_fit_the_budget(specs, budget, expected):
    options = {"block_size": 16, "max_model_len": 64, "max_requests": 3}
    size = memory_size(specs, **options, budget_bytes=budget)
    assert (size.num_blocks, size.num_state_slots, size.bytes) == expected
    assert size.bytes <= budget


@pytest.mark.parametrize(
    ("specs", "budget", "least", "fitting"),
    [
        ([KV, STATE], 4 * 2048 + 1023, 9_216, 48),
        ([KV], 2048, 8_192, 16),
        ([KV], 2047, 8_192, None),
        ([KV, STATE], 1000, 9_216, None),
        ([STATE], 1023, 1_024, None),
    ],
)
def test_a_budget_below_one_request_is_told_the_length_and_the_budget_that_fit(
    specs, budget, least, fitting
):
    def size(max_model_len: int, budget: int) -> object:
        options = {"block_size": 16, "max_requests": 3}
        return memory_size(specs, **options, max_model_len=max_model_len, budget_bytes=budget)

    with pytest.raises(ConfigError, match=f"one such request takes {least:,}") as raised:
        size(64, budget)
    assert f"memory_bytes of at least {least:,} (--memory-mib 1)" in raised.value.fix
    size(64, least)
    if fitting is None:
        assert "No length fits" in raised.value.fix
    else:
        assert f"max_model_len (--max-model-len) of at most {fitting}," in raised.value.fix
        size(fitting, budget)
        with pytest.raises(ConfigError):
            size(fitting + 1, budget)


@pytest.mark.parametrize(
    ("device", "memory_bytes", "expected"),
    [("cpu", None, 33), ("cuda", None, 100), ("cpu", 400, 133), ("cuda", 400, 133)],
)
def test_ranks_on_cpus_share_what_is_free_and_devices_have_their_own(
    device, memory_bytes, expected
):
    place = torch.device(device)
    assert rank_bytes(place, memory_bytes, 100, ranks=3) == expected
    assert rank_bytes(place, memory_bytes, 100, ranks=1) == (memory_bytes or 100)
