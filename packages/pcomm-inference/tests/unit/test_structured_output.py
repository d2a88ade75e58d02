"""Text that follows a schema or an expression, from logits that know nothing of it."""

import json
import pickle
import re
import sys
from functools import partial

import jsonschema
import pytest
import tokenizers
import torch
from tokenizers import decoders

from inference_support.trained_tokenizers import Tokens, byte_level
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.inference.engine.request import Request
from pcomm.inference.sampling import grammars
from pcomm.inference.sampling.filters import mask_by_grammar
from pcomm.inference.sampling.grammars import GrammarCompiler
from pcomm.inference.sampling.params import SamplingParams, SamplingRow
from pcomm.inference.sampling.sampler import Sampler

# Not 0, which is what the largest of equal logits gives.
END = 1
# More logits than tokens, as in models whose vocabulary is padded; no multiple of 32.
VOCABULARY = 405
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é🙂", None]}, "maxItems": 4},
        "inner": {"$ref": "#/$defs/inner"},
    },
    "required": ["name", "age", "tags", "inner"],
    "additionalProperties": False,
    "$defs": {"inner": {"anyOf": [{"type": "boolean"}, {"const": 1.5}]}},
}


def trained() -> Tokens:
    return byte_level([json.dumps(SCHEMA), "hello world"], 400)


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return trained()


@pytest.fixture
def compiler(tokens) -> GrammarCompiler:
    return GrammarCompiler(tokens, VOCABULARY)


def written(tokens, compiler, params: list[SamplingParams], most: int = 300) -> list[str]:
    """The text of each request, from random logits, all in one batch."""
    grammars = [compiler.compile(one) for one in params]
    states = [grammar and grammar.begin() for grammar in grammars]
    outputs: list[list[int]] = [[] for _ in params]
    live = list(range(len(params)))
    sampler, generator = Sampler(VOCABULARY, "cpu"), torch.Generator().manual_seed(0)
    for _ in range(most):
        rows = [
            SamplingRow(
                params[n],
                [1],
                outputs[n],
                len(outputs[n]),
                (END,),
                states[n] and states[n].allowed_words,
            )
            for n in live
        ]
        logits = torch.randn(len(rows), VOCABULARY, generator=generator) * 2
        for n, token_id in zip(live, sampler.sample(logits, rows).token_ids, strict=True):
            outputs[n].append(token_id)
            if states[n] is not None:
                states[n].accept(token_id)
        live = [n for n in live if states[n] is not None and not states[n].is_finished]
        if not live:
            break
    assert not live
    return [tokens.decode(output) for output in outputs]


def test_random_logits_give_what_the_schema_or_the_expression_says(tokens, compiler) -> None:
    kinds = [{}, {"temperature": 0}, {"top_p": 0.8}, {"temperature": 3.0}, {"top_k": 5}]
    schema, expression = json.dumps(SCHEMA), r"(ab|[0-9]é){3,5}x?"
    params = [
        SamplingParams(seed=seed, **{name: text}, **kinds[seed % 5])
        for seed in range(20)
        for name, text in (("json_schema", schema), ("regex", expression))
    ]
    # One without a grammar among them, which is not held to any.
    found = written(tokens, compiler, [*params, SamplingParams()])
    for text in found[:-1:2]:
        jsonschema.validate(json.loads(text), SCHEMA)
    for text in found[1:-1:2]:
        assert re.fullmatch(expression, text)
    assert len(set(found)) > 30


# Both kinds of vocabularies: with whole words of 32 bits, and with a part of one.
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 416])
def test_an_end_is_allowed_exactly_where_the_text_may_end(tokens, vocabulary) -> None:
    state = GrammarCompiler(tokens, vocabulary).compile(SamplingParams(regex="ab+")).begin()

    def allowed() -> set[str]:
        words = state.allowed_words().tolist()
        assert len(words) == 13
        ids = [i for i in range(32 * len(words)) if words[i // 32] >> (i % 32) & 1]
        assert max(ids) < 400
        return {"end" if i == END else tokens.decode([i]) for i in ids}

    assert allowed() == {"a"}
    state.accept(tokens.encode("a")[0])
    assert allowed() == {"b"}
    state.accept(tokens.encode("b")[0])
    assert allowed() == {"b", "end"}
    assert not state.is_finished
    state.accept(END)
    assert state.is_finished


def test_an_end_comes_behind_min_tokens_where_the_grammar_has_more(tokens, compiler) -> None:
    params = [SamplingParams(regex="ab*", min_tokens=4, seed=seed) for seed in range(20)]
    found = written(tokens, compiler, params)
    # The end token stands behind 4 letters or more.
    assert min(map(len, found)) == 4
    assert written(tokens, compiler, [SamplingParams(regex="ab?", min_tokens=4)]) == ["ab"]


def test_min_tokens_gives_way_to_a_grammar_that_allows_nothing_but_an_end() -> None:
    def mask(*ids: int) -> torch.Tensor:
        words = torch.zeros(2, dtype=torch.int64)
        for token_id in ids:
            words[token_id // 32] |= 1 << (token_id % 32)
        return words.to(torch.int32)

    params = SamplingParams(min_tokens=4)
    allowed = [(31, 33), (31,), (5, 31), (31, 33, 40)]
    rows = [SamplingRow(params, [1], [2], 2, (31, 33), partial(mask, *ids)) for ids in allowed]
    logits = torch.zeros(4, 41)
    mask_by_grammar(logits, rows)
    found = [row.isfinite().nonzero()[:, 0].tolist() for row in logits]
    assert found == [[31, 33], [31], [5], [40]]


def test_requests_with_the_same_grammar_go_their_own_ways(tokens, compiler) -> None:
    params = SamplingParams(regex="ab|cd")
    one, other = compiler.compile(params).begin(), compiler.compile(params).begin()
    one.accept(tokens.encode("a")[0])
    other.accept(tokens.encode("c")[0])
    assert not torch.equal(one.allowed_words(), other.allowed_words())
    with pytest.raises(UnsupportedError, match="doesn't satisfy the grammar") as caught:
        one.accept(tokens.encode("c")[0])
    assert len(str(caught.value).splitlines()) == 3
    other.accept(tokens.encode("d")[0])
    assert other.is_finished


def test_a_grammar_is_for_its_settings_and_its_model_alone(tokens, compiler) -> None:
    params = SamplingParams(regex="ab")
    grammar = compiler.compile(params)
    assert compiler.kept(params) is grammar
    assert compiler.kept(SamplingParams()) is None
    grammar.check(SamplingParams(regex="ab", seed=3), tokens, VOCABULARY)
    for wrong in (SamplingParams(), SamplingParams(regex="a"), SamplingParams(json_schema="{}")):
        with pytest.raises(ConfigError, match="other settings"):
            grammar.check(wrong, tokens, VOCABULARY)
    for other in ((trained(), VOCABULARY), (tokens, VOCABULARY + 1), (None, VOCABULARY)):
        with pytest.raises(ConfigError, match="another tokenizer or vocabulary"):
            grammar.check(params, *other)


def test_a_request_goes_to_another_process_without_its_compiled_grammar(compiler) -> None:
    params = SamplingParams(regex="ab")
    request = Request("name", (1, 2), params, grammar=compiler.compile(params))
    found = pickle.loads(pickle.dumps(request))
    assert found == request
    assert found.grammar is None
    assert request.grammar is not None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"json_schema": "{bad"}, "no JSON.*line 1 column 2"),
        ({"json_schema": "[" * 60_000}, "nested too deep"),
        ({"json_schema": '{"$ref": "#"}'}, "no text satisfies it"),
        ({"json_schema": "[]"}, "object or boolean"),
        ({"json_schema": '{"type": "foo"}'}, "Invalid type: foo"),
        ({"json_schema": '{"$ref": "#/nothing"}'}, "does not exist"),
        ({"json_schema": '{"not": {}}'}, "Unimplemented"),
        ({"json_schema": "false"}, "Unsatisfiable"),
        ({"json_schema": '{"const": NaN}'}, "NaN"),
        ({"json_schema": '{"const": 1e400}'}, "not JSON compliant"),
        ({"json_schema": '{"const": "\\ud800"}'}, "hex escape"),
        ({"json_schema": '{"items": ' * 140 + "{}" + "}" * 140}, "recursion"),
        ({"json_schema": '{"items": ' * 900 + "{}" + "}" * 900}, "recursion"),
        ({"json_schema": '{"multipleOf": 1' + "0" * 400 + "}"}, "multipleOf inf"),
        ({"json_schema": '{"multipleOf": true}'}, ""),
        ({"json_schema": '{"const": ""}'.ljust(65_537)}, "65537 bytes"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"grammar": ""}, "No 'root' rule"),
        ({"grammar": "start: a"}, "unknown name"),
        ({"grammar": "start: <nothing>"}, "unknown special token"),
        ({"grammar": 'start: start "a"'}, "no text satisfies it"),
        ({"grammar": "root ::= " + "(" * 60_000}, "recursion"),
        ({"grammar": 'start: %json {"type": "foo"}'}, "Invalid type: foo"),
        ({"grammar": 'start: %json {"const": 1'}, "parsing an object"),
        ({"grammar": 'start: %json {"title": "%json", "multipleOf": 10001}'}, "multipleOf 10001"),
        ({"grammar": 'start: "a"'.ljust(65_537)}, "65537 bytes"),
    ],
)
def test_what_cannot_be_compiled_is_an_error_with_the_reason(compiler, settings, reason) -> None:
    with pytest.raises(ConfigError, match=f"(?s){next(iter(settings))}: .*{reason}"):
        compiler.compile(SamplingParams(**settings))
    # The next request is not affected.
    assert compiler.compile(SamplingParams(regex="a")) is not None


@pytest.mark.parametrize("schema", ["true", "{}", '{"const": ""}'.ljust(65_536)])
def test_schemas_of_any_text_and_of_64_kib_are_compiled(compiler, schema) -> None:
    assert compiler.compile(SamplingParams(json_schema=schema)) is not None
    grammar = f"start: %json {schema}"[:65_536]
    assert compiler.compile(SamplingParams(grammar=grammar)) is not None


@pytest.mark.parametrize(
    ("grammar", "expression"),
    [
        # No regular expression counts brackets, so the test does.
        ('start: "(" start? ")"', r"\(+\)+"),
        ('root ::= "(" root? ")"', r"\(+\)+"),
        ('start: WORD ("," WORD){2}\nWORD: /[a-c]{1,3}/', r"[a-c]{1,3}(,[a-c]{1,3}){2}"),
        ('start: "n=" %json {"enum": [1, "é🙂"]}', '^n=(1|"é🙂")$'),
    ],
)
def test_random_logits_give_what_the_grammar_says(tokens, compiler, grammar, expression) -> None:
    params = [SamplingParams(seed=seed, grammar=grammar) for seed in range(10)]
    for text in written(tokens, compiler, params):
        assert re.fullmatch(expression, text)
        assert text.count("(") == text.count(")")


@pytest.mark.parametrize(
    ("fits", "above"),
    [
        ([10_000], [10_001]),
        ([-10_000.0], [-10_001]),
        ([99.99], [100.01]),
        ([0.01, 100], [0.01, 100.01]),
        ([2, 4, 5_000, 10_000], [101, 100]),
        ([0.0001], [0.001, 11]),
    ],
)
def test_schemas_whose_automaton_is_too_large_are_not_compiled(compiler, fits, above) -> None:
    # However they meet: in one number, or through a reference.
    for build in (
        lambda numbers: {"type": "integer", "allOf": [{"multipleOf": n} for n in numbers]},
        lambda numbers: {
            "$ref": "#/$defs/one",
            "multipleOf": numbers[-1],
            "$defs": {"one": {"type": "number", "multipleOf": numbers[0]}},
        },
    ):
        assert compiler.compile(SamplingParams(json_schema=json.dumps(build(fits)))) is not None
        with pytest.raises(ConfigError, match=f"multipleOf .*{abs(above[-1])}"):
            compiler.compile(SamplingParams(json_schema=json.dumps(build(above))))


@pytest.mark.parametrize(("number", "again"), [(16, 0), (17, 1)])
def test_few_grammars_are_kept(compiler, monkeypatch, number, again) -> None:
    compiled = []
    whole = GrammarCompiler._compile

    def counted(self, name, text):
        compiled.append(text)
        return whole(self, name, text)

    monkeypatch.setattr(GrammarCompiler, "_compile", counted)
    for text in [*map(str, range(number)), "0"]:
        compiler.compile(SamplingParams(regex=text))
    assert len(compiled) == number + again


def test_what_is_missing_is_an_error_of_requests_with_a_grammar_alone(tokens, monkeypatch) -> None:
    class Bare:
        eos_ids = (END,)
        encode, decode = tokens.encode, tokens.decode

    endless = Tokens(tokens.tokenizer, eos_ids=())
    undecoded = Tokens(tokenizers.Tokenizer.from_str(tokens.tokenizer.to_str()))
    undecoded.tokenizer.decoder = decoders.WordPiece()
    wrong = [
        (None, ConfigError, "without tokenizer"),
        (Bare(), UnsupportedError, "to_json"),
        (endless, ConfigError, "end token"),
        (undecoded, UnsupportedError, "llguidance does not read"),
    ]
    for tokenizer, kind, text in wrong:
        compiler = GrammarCompiler(tokenizer, VOCABULARY)
        assert compiler.compile(SamplingParams()) is None
        with pytest.raises(kind, match=text):
            compiler.compile(SamplingParams(regex="a"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = grammars.GrammarCompiler(tokens, VOCABULARY)
    assert compiler.compile(SamplingParams()) is None
    with pytest.raises(
        UnsupportedError, match=r"pip install \./packages/.*pcomm-inference\[structured\]'"
    ):
        compiler.compile(SamplingParams(json_schema="{}"))
