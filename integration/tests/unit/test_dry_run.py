"""`pcomm train --dry-run`: refuses what the start refuses, leaves nothing, and fits on a screen."""

from __future__ import annotations

import dataclasses
import gzip
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from integration_support.short_runs import run_words, train_quietly, write_words
from pcomm.core.cli import main
from pcomm.core.errors import ConfigError, PcommError
from pcomm.integration import recipes
from pcomm.integration.commands.conversion import run_to_directory
from pcomm.integration.commands.train_resilient import launch_resilient
from pcomm.integration.config.toml import apply_overrides
from pcomm.integration.forecast import dry_run as dry_run_module
from pcomm.integration.forecast import machine as machine_module
from pcomm.integration.forecast.counted_step import Computed
from pcomm.integration.forecast.dry_run import dry_run
from pcomm.integration.forecast.machine import Machine, read_cluster
from pcomm.integration.huggingface.model_from import start_config

CLUSTER = """
memory_gib = 80.0
fp32_tflops = 50.0
bf16_tflops = 600.0
memory_gb_per_s = 2000.0
link_gb_per_s = 200.0
network_gb_per_s = 25.0
"""

KEYS = st.fixed_dictionaries(
    {},
    optional={
        "model.pattern": st.sampled_from(["'A'", "'GM'", "'AGM'"]),
        "model.heads": st.sampled_from(["2", "3", "4"]),
        "model.kv_heads": st.sampled_from(["1", "3"]),
        "model.experts": st.sampled_from(["0", "2", "3"]),
        "model.experts_per_token": st.sampled_from(["1", "3"]),
        "model.rotary_fraction": st.sampled_from(["0.5", "0.3"]),
        "parallel.tp": st.sampled_from(["1", "2"]),
        "parallel.data": st.sampled_from(["'shard'", "'hybrid'"]),
        "parallel.zero": st.sampled_from(["1", "3"]),
        "parallel.ep": st.sampled_from(["1", "2"]),
        "parallel.failed": st.sampled_from(["['dp=0,tp=1']", "['dp=9']"]),
        "checkpoint.keep_best": st.sampled_from(["true"]),
        "train.decay_steps": st.sampled_from(["1"]),
        "train.schedule": st.sampled_from(["'wsd'", "'linear'"]),
        "train.dtype": st.sampled_from(["'auto'", "'bf16'"]),
        "train.recompute": st.sampled_from(["true"]),
        "train.sequence_length": st.sampled_from(["32", "48", "4000000000000"]),
        "train.micro_batch_tokens": st.sampled_from(["32", "33"]),
        "data.vocabulary": st.sampled_from(["256", "300"]),
        "data.held_out": st.sampled_from(["0.0", "0.99"]),
        "data.path": st.sampled_from(["['/nowhere/at/all.txt']"]),
    },
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Longer than a row: attention is an operation for each other length of a document.
    return write_words(tmp_path_factory.mktemp("text"), documents=12, shortest=100)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


@pytest.fixture(autouse=True)
def _measured_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine does in a step is no matter here, and is measured for a moment only."""
    monkeypatch.setattr(dry_run_module, "_REPLAY_S", 0.05)
    monkeypatch.setattr(machine_module, "_NUMBERS", 1 << 12)
    monkeypatch.setattr(machine_module, "_SENT", 1 << 16)


def refusal(call) -> str | None:
    try:
        call()
    except PcommError as error:
        return f"{type(error).__name__}: {error}"
    return None


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=KEYS)
def test_it_refuses_what_the_start_refuses(tmp_path_factory, text, changes):
    """The start itself is the oracle: one step of a run on this process."""
    out = tmp_path_factory.mktemp("out") / "run"
    words = ["train.steps=1", "train.eval_every='none'", *map("=".join, changes.items())]
    config = apply_overrides(recipes.tiny(), [f"data.path=['{text}']", *words])
    said = refusal(lambda: dry_run(config, out, 1))
    assert not out.exists()
    assert said == refusal(lambda: run_words(text, out, *words))


def no_compiler():
    raise RuntimeError("No working C++ compiler found")


@pytest.mark.parametrize(
    ("pattern", "words", "wanted"),
    [
        ("/*.txt", ["train.compile=true"], "train.compile"),
        ("", [], "data.path: "),
    ],
    ids=["no compiler", "a link to no file"],
)
def test_it_refuses_what_this_machine_lacks(tmp_path, monkeypatch, pattern, words, wanted):
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", no_compiler)
    texts, out = tmp_path / "texts", tmp_path / "run"
    texts.mkdir()
    write_words(texts, documents=3)
    (texts / "gone.md").symlink_to(tmp_path / "nowhere")
    words = [f"data.path=['{texts}{pattern}']", "train.steps=1", "train.eval_every='none'", *words]
    config = apply_overrides(recipes.tiny(), words)
    said = refusal(lambda: dry_run(config, out, 1))
    assert wanted in str(said)
    assert said == refusal(lambda: train_quietly(config, out))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_holds_the_parameters_and_what_the_optimizer_keeps(text, cluster, optimizer):
    words = [f"data.path=['{text}']", f"train.optimizer='{optimizer}'"]
    words += ["model.experts=2", "model.layers=1"]
    found = dry_run(apply_overrides(recipes.tiny(), words), None, 1, cluster=cluster)
    # The trainer's own tensors are the oracle; AdamW has a counter beside each parameter.
    memory = found.step.memory
    assert 0 <= memory.weights + memory.optimizer - found.checkpoint_bytes < 200


# A row for each of eight replicas, where those of the command have 256 tokens.
ROWS_OF_32 = ["train.sequence_length=32", "train.global_batch_tokens=256"]
SHORT = ["train.steps=1", "train.eval_every='none'", "model.layers=1"]


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory) -> Path:
    """A run of one step."""
    run = tmp_path_factory.mktemp("finished") / "run"
    run_words(text, run, *SHORT)
    return run


def weights(run: Path) -> Path:
    files = (file for file in (run / "checkpoints").rglob("*") if file.is_file())
    return max(files, key=lambda file: file.stat().st_size)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def more_text(run: Path, text: Path) -> None:
    (text / "new.txt").write_text("a document that the run has not learnt " * 9)


GOING_ON = {
    "as it was": (lambda run, text: None, [], None),
    "other text": (more_text, [], "checkpoint"),
    "other shape": (lambda run, text: None, ["model.layers=2"], "model.layers"),
    "fewer words": (lambda run, text: None, ["data.vocabulary=257"], "vocabulary"),
    "damaged weights": (
        lambda run, text: cut(weights(run)),
        [],
        "has changed since it was written",
    ),
    "no tokenizer": (lambda run, text: (run / "tokenizer.json").unlink(), [], "tokenizer"),
    "damaged tokens": (lambda run, text: cut(run / "data" / "manifest.json"), [], None),
    "damaged, from the beginning": (
        lambda run, text: cut(weights(run)),
        ["restart"],
        None,
    ),
}


@pytest.mark.parametrize("case", GOING_ON)
def test_it_refuses_a_run_that_cannot_go_on(case, finished, text, tmp_path):
    """The start itself is the oracle, on the same folder afterwards."""
    change, words, wanted = GOING_ON[case]
    restarts = words == ["restart"]
    run, words = tmp_path / "run", [] if restarts else words
    shutil.copytree(Path(text).parent, tmp_path / "text")
    shutil.copytree(finished, run)
    change(run, tmp_path / "text")
    glob = f"{tmp_path}/text/*.txt"
    config = apply_overrides(recipes.tiny(), [f"data.path=['{glob}']", *SHORT, *words])
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    said = refusal(lambda: dry_run(config, run, 1, must_restart=restarts))
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*") if file != run} == {
        file: time for file, time in before.items() if file != run
    }
    assert said == refusal(lambda: run_words(glob, run, *SHORT, *words, must_restart=restarts))
    assert (wanted or "") in (said or "")
    assert (said is None) == (wanted is None)


def with_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def narrow(tensors) -> None:
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[name] = tensors[name][1:].clone()


STARTING = {
    "as it was": (lambda folder: None, None),
    "a tensor less": (lambda f: with_tensors(f, lambda ts: ts.pop("lm_head.weight")), "no tensor"),
    "another shape": (lambda f: with_tensors(f, narrow), "of shape"),
    "a tensor more": (
        lambda f: with_tensors(f, lambda ts: ts.update(more=torch.zeros(1))),
        "does not have",
    ),
    "other numbers": (
        lambda f: with_tensors(f, lambda ts: ts.update({"lm_head.weight": torch.zeros(1).int()})),
        "lm_head.weight",
    ),
    "cut off": (lambda folder: cut(folder / "model.safetensors"), "model.safetensors"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
}


@pytest.mark.parametrize("case", STARTING)
def test_it_refuses_weights_that_cannot_be_read(case, finished, text, tmp_path):
    change, wanted = STARTING[case]
    directory, out = tmp_path / "directory", tmp_path / "out"
    run_to_directory(finished, directory)
    change(directory)
    model = dataclasses.replace(recipes.tiny().model, from_=str(directory))
    words = [f"data.path=['{text}']", *SHORT, f"model.from={directory}"]
    config = start_config(apply_overrides(recipes.tiny(), words), out)
    assert config.model.from_ == model.from_
    said = refusal(lambda: dry_run(config, out, 1))
    assert not out.exists()
    assert said == refusal(lambda: run_words(text, out, *SHORT, f"model.from={directory}"))
    assert (wanted or "") in (said or "")
    assert (said is None) == (wanted is None)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--ranks", "3", "--set", "parallel.tp=2"], "TopologyError: parallel"),
        (["--ranks", "0"], "ConfigError: pcomm train --ranks 0"),
        (["--set", "model.heads=3"], "ConfigError: model.head_dim"),
        (["--set", "modle.heads=3"], "Did you mean"),
    ],
)
def test_refusals_of_the_command_are_the_same(tmp_path, capsys, words, wanted):
    out = tmp_path / "run"
    told = []
    for dry in ([], ["--dry-run"]):
        assert main(["train", "--out", str(out), *words, *dry]) == 2
        told.append(capsys.readouterr().err)
    assert told[0] == told[1]
    assert wanted in told[0]
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (CLUSTER + "bf16_tflop = 1.0", "bf16_tflop"),
        ("memory_gib = 80.0", "cluster.fp32_tflops"),
        (CLUSTER.replace("600.0", "0.0"), "cluster.bf16_tflops"),
        ("memory_gib = ", "--cluster"),
        (None, "--cluster"),
    ],
    ids=["unknown key", "missing key", "nothing a second", "no TOML", "no file"],
)
def test_a_cluster_that_is_none(tmp_path, content, wanted):
    path = tmp_path / "cluster.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=wanted):
        read_cluster(path)


def test_the_screen_of_many_ranks(tmp_path, text, cluster, capsys):
    words = ["model.layers=2", "model.width=64", "parallel.tp=2", *ROWS_OF_32]
    words += ["parallel.data='shard'", "data.vocabulary=300"]
    sets = [part for word in (f"data.path=['{text}']", *words) for part in ("--set", word)]
    out = tmp_path / "deep" / "run"
    command = ["train", "--dry-run", "--ranks", "16", "--out", str(out), *sets]
    assert main([*command, "--cluster", str(cluster)]) == 0
    screen = capsys.readouterr().out
    assert len(screen.splitlines()) <= 25
    for word in (
        "parameters in blocks AA",
        "dp 8 x cp 1 x tp 2",
        "checkpoint",
        "data.inner[gather]",
    ):
        assert word in screen
    assert not out.parent.exists()
    command.remove("--out")
    command.remove(str(out))
    assert main([*command, "--cluster", str(cluster)]) == 0
    assert capsys.readouterr().out == screen
    command.remove("--dry-run")
    assert main(command) == 2
    assert "no --out" in capsys.readouterr().err


def test_the_screen_without_ranks_that_have_failed(tmp_path, text, cluster, capsys):
    """Two ranks of one replica and one of the other: the second computes all of its part."""
    words = ["parallel.dp=2", "parallel.tp=2", "train.dtype=auto"]
    whole, left = [], ["parallel.failed=['dp=0,tp=1']"]
    peaks = []
    for more, ranks in ((whole, 4), (left, 3)):
        changes = [f"data.path=['{text}']", *words, *more]
        found = dry_run(apply_overrides(recipes.tiny(), changes), None, ranks, cluster=cluster)
        assert found.config.train.dtype == "bf16"
        peaks.append(found.step.memory.weights)
    assert 1.5 < peaks[1] / peaks[0] <= 2


def test_text_that_is_not_tokenised_is_estimated(tmp_path, text, cluster, monkeypatch):
    config = apply_overrides(recipes.tiny(), [f"data.path=['{text}']", "model.layers=1"])
    size = sum(Path(path).stat().st_size for path in Path(text).parent.glob("*.txt"))
    for limit, word in ((size, "held out with"), (size - 1, "not read")):
        monkeypatch.setattr(dry_run_module, "_TOKENISED_BYTES", limit)
        assert word in dry_run(config, tmp_path / "run", 1, cluster=cluster).text
    assert "not read: about" in dry_run(config, tmp_path / "run", 1, cluster=cluster).text
    packed = tmp_path / "packed.txt.gz"
    packed.write_bytes(gzip.compress(b"a word and another\n" * 100))
    config = apply_overrides(recipes.tiny(), [f"data.path=['{packed}']", "model.layers=1"])
    monkeypatch.setattr(dry_run_module, "_TOKENISED_BYTES", 1)
    assert "not read: at least" in dry_run(config, tmp_path / "run", 1, cluster=cluster).text


def test_a_step_is_as_long_as_its_slower_half(cluster):
    """By hand: a product is bound by flops or by bytes, and nothing is shorter than a launch."""
    machine = dataclasses.replace(read_cluster(cluster), operation_us=10.0)
    assert isinstance(machine, Machine)
    product = Computed(torch.bfloat16, int(600e12), 1)
    assert machine.seconds(product) == pytest.approx(1.0, rel=1e-4)
    assert machine.seconds(product._replace(dtype=torch.float32)) == pytest.approx(12, rel=1e-4)
    assert machine.seconds(Computed(torch.float32, 1, int(4e12))) == pytest.approx(2, rel=1e-4)
    assert machine.seconds(Computed(torch.float32, 0, 0)) == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["parallel.data='shard'", "parallel.zero=3"], "parallel.zero"),
        (["parallel.data='hybrid'", "parallel.shard_ranks=2"], "parallel.data"),
        (["parallel.copies=3"], "parallel.copies"),
        (["parallel.tp=3"], "parallel"),
        (["train.sequence_length=4000000000000"], "train.global_batch_tokens"),
    ],
)
def test_a_resilient_dry_run_refuses_what_its_launch_refuses(text, tmp_path, words, wanted):
    out = tmp_path / "run"
    config = apply_overrides(recipes.tiny(), [f"data.path=['{text}']", *words])
    said = refusal(lambda: dry_run(config, out, 4, is_resilient=True))
    assert wanted in str(said)
    assert said == refusal(lambda: launch_resilient(config, out, 4, must_restart=False))
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "per_host", "survives", "goes_back"),
    [
        ([], 4, "any 3 ranks: no step", "to the beginning: after the loss of a host, or of 4"),
        (["parallel.data='shard'"], 4, "any 1 rank: no step", "the loss of a host, or of 2 ranks"),
        (["parallel.data='shard'"], 2, "any 1 rank, or the loss of any 1 host: no step", "2 hosts"),
        (
            ["parallel.data='shard'", "parallel.copies=1"],
            2,
            "no death",
            "after the death of a rank",
        ),
    ],
)
def test_a_resilient_dry_run_says_what_is_survived(
    text, cluster, capsys, tmp_path, words, per_host, survives, goes_back
):
    cluster.write_text(CLUSTER + f"ranks_per_host = {per_host}\n")
    settings = [f"data.path=['{text}']", "checkpoint.every='end'", "parallel.dp=4", *words]
    settings += ["model.layers=1", *ROWS_OF_32]
    options = [word for one in settings for word in ("--set", one)]
    command = ["train", "--dry-run", "--resilient", "--ranks", "5", *options]
    assert main([*command, "--cluster", str(cluster)]) == 0
    rows = {line[:12].strip(): line[12:] for line in capsys.readouterr().out.splitlines()}
    assert survives in rows["survives"]
    assert goes_back in rows["goes back"]
    assert ("weights of owners" in rows["sent"]) == bool(words)
    assert rows["hosts"].startswith(f"{4 // per_host} of {per_host} ranks each")
    # Neither is started, and a store that is named would say that this process is a rank.
    assert main([*command, "--store", "127.0.0.1:1", "--cluster", str(cluster)]) == 2


def test_tokens_that_a_run_has_kept_are_taken_and_none_are_kept(
    tmp_path, text, cluster, caplog, monkeypatch
):
    caplog.set_level("INFO", "pcomm.train")
    cache = tmp_path / "cache"
    words = [f"data.path=['{text}']", f"data.cache='{cache}'", "model.layers=1"]
    config = apply_overrides(recipes.tiny(), words)
    wanted = dry_run(config, None, 1, cluster=cluster)
    assert "made now, and not kept" in caplog.text
    assert not cache.exists()
    run_words(text, tmp_path / "run", f"data.cache='{cache}'", *SHORT)

    def kept() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}

    def refused(*given, **named):
        raise AssertionError("no token is made")

    before = kept()
    with monkeypatch.context() as patched:
        patched.setattr("pcomm.integration.data.preparation.build", refused)
        assert dry_run(config, None, 1, cluster=cluster) == wanted
    assert "took the tokens" in caplog.text
    assert kept() == before
    # What is damaged is not used, and it is left to a run to remove it.
    cut(max(before, key=lambda path: path.stat().st_size))
    damaged = kept()
    assert dry_run(config, None, 1, cluster=cluster) == wanted
    assert kept() == damaged != before
