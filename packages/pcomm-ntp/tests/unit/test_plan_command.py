import json
import logging
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from pcomm.core import Topology, cli
from pcomm.ntp import Coord, Failures, NtpPlan, Units, plan

SMALL = ["--axes", "dp=4,tp=8", "--heads", "32", "--kv-heads", "8", "--mlp", "11008"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """`pcomm plan` with arguments: its exit code, its output, and its errors."""
    found = EntryPoints([EntryPoint("plan", "pcomm.ntp.plan_command:command", cli.GROUP)])
    monkeypatch.setattr(cli, "entry_points", lambda group: found.select(group=group))
    for name in ("PCOMM_LOG", "RANK"):
        monkeypatch.delenv(name, raising=False)
    logger = logging.getLogger("pcomm")
    handlers, level = list(logger.handlers), logger.level

    def call(*words: str) -> tuple[int, str, str]:
        code = cli.main(["plan", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield call
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_it_prints_what_the_plan_says(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "failed.json"
    file.write_text('[17, {"dp": 3, "tp": 5}]')
    words = ["--failures", "dp=0,tp=1", "--failures-file", str(file), "--speeds", "dp=1,tp=2:0.5"]
    code, out, err = run(*SMALL, *words)
    units = {
        "attention": Units.gqa(q=32, kv=8, dim=128, work=2 * (32 + 8) * 128),
        "mlp": Units.gated(11008, work=3 * 11008),
    }
    down = Failures((Coord(dp=0, tp=1), Coord(dp=3, tp=5)), (17,))
    made = plan(Topology({"dp": 4, "tp": 8}), down, units, speeds={10: 0.5})
    assert (code, err) == (0, "")
    assert out.startswith(made.explain())
    assert f"at most {made.cost().most_segments} groups" in out
    assert "rank 10 (dp=1,tp=2): speed 0.500, attention 1 of 8 units" in out


def test_json_has_a_plan_that_can_be_read_again(run: Run, tmp_path: Path) -> None:
    entries = {
        "*.qkv.weight": {"kind": "gqa", "q": 64, "kv": 32, "dim": 2},
        "*.in.weight": {"kind": "fused", "count": 33, "sections": [2, 1]},
        "norm": {"kind": "replicated"},
    }
    file = tmp_path / "units.json"
    file.write_text(json.dumps(entries))
    words = ["--axes", "tp=32,dp=2", "--order", "tp,dp", "--units", str(file), "--policy", "nice"]
    code, out, _ = run(*words, "--failures", "dp=1,tp=0", "--json")
    found = json.loads(out)
    units = {
        "*.qkv.weight": Units.gqa(q=64, kv=32, dim=2),
        "*.in.weight": Units.fused(33, sections=(2, 1)),
        "norm": Units.replicated(),
    }
    made = NtpPlan.from_json(json.dumps(found["plan"]))
    assert code == 0
    assert dict(made.units) == units
    assert made.policy.rounding == "nice"
    assert found["degrees"] == [list(own) for own in made.degrees]
    assert found["idle_ranks"] == list(made.idle_ranks)
    assert found["cost"]["throughput"] == pytest.approx(float(made.cost().throughput))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--axes", "dp=4,tp:8"], "the item 'tp:8'"),
        (["--axes", "dp=4,dp=2,tp=8"], "the item 'dp=2'"),
        (["--axes", "pp=4,tp=8"], "Add 'dp'"),
        (["--axes", "dp=1000000000,tp=8"], "more than 4194304 ranks"),
        (["--order", "tp,pp"], "List every axis once"),
        (["--failures", "dp=9,tp=0"], "Use 0 to 3"),
        (["--failures", "99"], "Use a rank of this topology"),
        (["--failures", "dp=1;tp=0"], "Write it like 'dp=3,pp=0,tp=5'"),
        (["--failures", *map(str, range(8))], "Plan without replica dp=0"),
        (["--failures-file", "absent.json"], "a JSON file that can be read"),
        (["--speeds", "dp=1,tp=2"], "Write it like --speeds"),
        (["--speeds", "3:fast"], "the speed 'fast'"),
        (["--speeds", "0.5"], "no colon"),
        (["--failures", "self=1,tp=0"], "'self' in Coord(self=1, tp=0)"),
        (["--speeds", "3:0.5", "3:0.6"], "rank 3 with speed 0.5 before"),
        (["--speeds", "3:0"], "Give a number above 0"),
        (["--speeds", "3:1.5"], "at most 1"),
        (["--speeds", "3:nan"], "outside of 0 < speed <= 1"),
        (["--speeds", "33:0.5"], "Use a rank of this topology"),
        (["--kv-heads", "7"], "Give q as a multiple of kv"),
        (["--heads", "0", "--kv-heads", "0"], "at least 1"),
        (["--mlp", "0"], "Give a length that is a multiple of block"),
        (["--head-dim", "-1"], "Give sizes of at least 1"),
        (["--kv-heads", "4"], "Use tp=4 or less"),
        (["--failures-file", __file__], "no JSON"),
        (["--units", "absent.json"], "Leave one of the two away"),
    ],
)
def test_a_mistake_is_a_message_and_exit_code_2(run: Run, words: list[str], message: str) -> None:
    code, out, err = run(*SMALL, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") >= 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[]", "at the top"),
        ("{}", "at the top"),
        ('{"a": 3}', "3 for 'a'"),
        ('{"a": {"q": 3}}', "kind None"),
        ('{"a": {"kind": "gatet", "columns": 8}}', "Did you mean 'gated'"),
        ('{"a": {"kind": "gated", "column": 8}}', "Did you mean 'columns'"),
        ('{"a": {"kind": "gated"}}', "no 'columns'"),
        ('{"a": {"kind": "gated", "columns": 8.5}}', "columns=8.5"),
        ('{"a": {"kind": "gated", "columns": true}}', "columns=True"),
        ('{"a": {"kind": "fused", "count": 8, "sections": 3}}', "sections=3"),
        ('{"a": {"kind": "fused", "count": 8, "sections": []}}', "at least one position"),
        ('{"a": {"kind": "replicated", "work": 1}}', "replicated has no arguments"),
    ],
)
def test_a_file_of_other_units_is_named(run: Run, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "units.json"
    file.write_text(text)
    code, out, err = run("--axes", "dp=2,tp=2", "--units", str(file))
    assert (code, out) == (2, "")
    assert message in err


def test_without_units_it_asks_for_sizes(run: Run, tmp_path: Path) -> None:
    for words in ([], ["--kv-heads", "8"]):
        code, _, err = run("--axes", "dp=2,tp=2", *words)
        assert code == 2
        assert "Give the sizes of the model" in err
    code, _, err = run("--axes", "dp=2,tp=2", "--units", str(tmp_path / "absent.json"))
    assert code == 2
    assert "Give the path of a JSON file" in err
