"""`pcomm bench serving`: what is refused, what is compared, and each part from end to end."""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from core_bench.runner import Row
from pcomm.core.errors import ConfigError, UnsupportedError
from serving_bench import server
from serving_bench import sides as theirs
from serving_bench.command import command
from serving_bench.results import PartResults
from serving_bench.settings import PARTS, QUICK, Settings, write_plain_tokenizer
from serving_bench.sides import AttentionCalls, Products, begin, loaded, open_engine
from serving_bench.stream_client import Stream

tokenizers = pytest.importorskip("tokenizers")


def run(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--parts", "stream"], "no part 'stream'"),
        (["--streams", "0"], "a number below 1"),
        (["--contexts", "1;2"], "words that are no numbers"),
        (["--threads", "4,-1"], "a number below 1"),
        (["--rounds", "2"], "fewer than 3 rounds"),
        (["--model", "nowhere"], r"no config\.json there"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(words, told):
    with pytest.raises(ConfigError, match=told) as caught:
        run(words)
    assert str(caught.value).startswith("pcomm bench serving --")


@pytest.mark.parametrize(
    ("module", "part", "told"),
    [
        (theirs, "tiny", "pip install transformers"),
        (server, "server", r"pip install \./packages/.* '\./integration\[serve\]'"),
    ],
)
def test_a_package_that_is_missing_is_named_before_minutes_of_measuring(
    monkeypatch, module, part, told
):
    pytest.importorskip("transformers", reason="the second case gets past it")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=told):
        run(["--quick", "--parts", part])


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all that a quick run of all parts has written."""
    for package in ("transformers", "matplotlib", "fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(package, reason="the benchmark stands on it")
    folder = tmp_path_factory.mktemp("serving")
    words = ["--csv", "rows.csv", "--plot", "new/goals.png", "--report", "new/report.md"]
    paths = [word if word.startswith("--") else str(folder / word) for word in words]
    assert run(["--quick", *paths]) == 0
    return folder


def rows_in(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    with (folder / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(row["case"], row["unit"]): row for row in rows}
    assert len(found) == len(rows), "a case has two values of one unit"
    return found


def test_rows_of_every_part_name_what_they_are_compared_with(quick):
    rows = rows_in(quick)
    assert {row["benchmark"] for row in rows.values()} == {f"serving {part}" for part in PARTS}
    for (case, unit), row in rows.items():
        assert set(row) == {column.name for column in fields(Row)}
        assert ", transformers " in row["torch"]
        if row["ratio_to"]:
            assert (row["ratio_to"], unit) in rows, case
            assert float(row["ratio"]) > 0
    streams = [case for case, unit in rows if unit == "tokens/s" and ", streams " in case]
    assert sorted(streams) == sorted(
        f"{name} @ small, threads 1, streams {count}"
        for name, most in {"pcomm": 3, "generate": 2, "generate, static cache": 2}.items()
        for count in QUICK.streams[:most]
    )


def test_both_write_the_same_tokens(quick):
    equal = {key: row for key, row in rows_in(quick).items() if key[0].startswith("equal tokens")}
    # The streams, the tiny model, and two recurrent models behind two contexts.
    assert len(equal) == 6
    for (case, unit), row in equal.items():
        assert unit == f"of {int(float(row['value']))} tokens", case


def test_prompts_are_cached_and_streams_complete(quick):
    rows = rows_in(quick)
    for shape in ("GPT", "hybrid"):
        case = f"nine tenths cached @ {shape}, {QUICK.prefix_prompt} tokens"
        assert float(rows[case, "cached tokens"]["value"]) == 0.9 * QUICK.prefix_prompt
    lost = {unit: row for (_, unit), row in rows.items() if unit.startswith("tokens lost")}
    # One round goes before those that count.
    assert [*lost] == [f"tokens lost of {QUICK.server_streams * (QUICK.rounds + 1)} streams"]
    assert [float(row["value"]) for row in lost.values()] == [0]
    # Three chunks of two layers with two heads each, at least a call for each chunk.
    calls = [row for (_, unit), row in rows.items() if unit == "calls of torch's attention"]
    assert [float(row["value"]) % 2 for row in calls] == [0]
    assert all(float(row["value"]) >= 2 * 3 for row in calls)


def test_the_report_has_a_line_for_each_goal_and_part(quick):
    head, rule, *lines = (quick / "new" / "report.md").read_text().splitlines()
    assert head == "| measured | goal | reached | met |"
    assert rule.count("---") == 4
    goals = [line for line in lines if line.startswith("|")]
    assert len(goals) == 10
    assert all(line.endswith(("| yes |", "| no |")) for line in goals)
    told = [line.split("*")[1] for line in lines if line.startswith("- ")]
    assert told == list(PARTS)
    assert (quick / "new" / "goals.png").read_bytes().startswith(b"\x89PNG")


def test_a_goal_is_met_on_its_side_of_the_limit():
    found = PartResults("tiny")
    found.at_most("a ratio", 1.2, 1.2)
    found.at_most("a ratio", 1.2, 1.3)
    found.at_least("a ratio", 2.5, 2.5)
    found.at_least("a ratio", 2.5, 2.4)
    assert [goal.is_met for goal in found.goals] == [True, False, True, False]


@pytest.mark.parametrize("vocabulary", [62, 63, 62 + 62**2 + 7])
def test_every_token_of_random_weights_has_text(tmp_path, vocabulary):
    write_plain_tokenizer(tmp_path, vocabulary)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocabulary
    texts = [tokenizer.decode([token]) for token in range(vocabulary)]
    assert len(set(texts)) == vocabulary
    assert all(text.isalnum() for text in texts)


def events(parts: Sequence[bytes]) -> list[tuple[float, str]]:
    stream = Stream([(float(place), part) for place, part in enumerate(parts)])
    return [(when, event["choices"][0]["text"]) for when, event in stream.events()]


def test_events_are_read_wherever_the_bytes_are_cut():
    sent = b"".join(
        [
            b"HTTP/1.1 200 OK\r\n\r\n",
            b'data: {"choices": [{"text": "a"}]}\n\n',
            b': a comment\ndata: {"choices": [{"text": "b"}]}\n\n',
            b"data: [DONE]\n\n",
        ]
    )
    for cut in range(len(sent)):
        found = events([sent[:cut], sent[cut:]])
        assert [text for _, text in found] == ["a", "b"]
        # An event has come when its line has ended.
        ends = [sent.index(b"}\n") + 2, sent.rindex(b"}\n") + 2]
        assert [when for when, _ in found] == [float(end > cut) for end in ends]


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}", b'data: {"choices": []}\n\n']
)
def test_a_stream_that_does_not_end_in_order_is_an_error(answer):
    with pytest.raises(RuntimeError):
        Stream([(0.0, answer)]).events()


class Linears(TorchFunctionMode):
    """Counts matrix products by their rows and their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[int, int]] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is F.linear:
            self.found[args[0].shape[:-1].numel(), args[1].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="it writes the model")
    from serving_bench.settings import Directories

    return Directories(tmp_path_factory.mktemp("models")).of(Settings().models.tiny)


def test_products_alone_are_those_of_a_step(small):
    model = loaded(small)
    products = Products(model.model)
    with open_engine(model, max_model_len=16, num_requests=3) as engine:
        texts = begin(engine, [[5], [6, 7], [8]], 8)
        with Linears() as of_step:
            texts.step()
    with Linears() as alone:
        products.caller(3, 3)()
    assert alone.found == of_step.found
    # Four matrices in each of four layers, and the head.
    assert alone.found.total() == 17


def test_attention_calls_are_made_again_for_every_layer(small):
    model = loaded(small)
    seen: list[Tensor] = []

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is F.scaled_dot_product_attention:
                seen.append(args[1])
            return func(*args, **(kwargs or {}))

    with (
        open_engine(model, max_model_len=64, max_batch_tokens=16) as engine,
        Calls(),
        AttentionCalls(4) as calls,
    ):
        begin(engine, [list(range(40))], 2, after_step=calls.end_step)
    of_engine = [tuple(keys.shape) for keys in seen]
    seen.clear()
    with Calls():
        calls.again()
    assert sorted(tuple(keys.shape) for keys in seen) == sorted(of_engine)
    assert len(seen) == calls.num_calls
    with pytest.raises(AssertionError, match="0 calls of torch's attention in a step of 4 layers"):
        calls.end_step()
