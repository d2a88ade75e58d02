"""Each family against transformers: read, computed, written, and read again."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from integration_support.huggingface_directories import SMALL_CONFIGS, write_directory
from pcomm.core.tensor_parallel import param_layouts_of, take_shard
from pcomm.core.testing.virtual import VirtualCollectives, run_virtual
from pcomm.integration.config.model_rules import resolve_model
from pcomm.integration.huggingface import (
    export_model,
    load_model,
    open_directory,
    read_model,
    tensors,
    write_config,
)
from pcomm.integration.huggingface.directory import ModelDirectory
from pcomm.integration.huggingface.tensors import TensorFiles
from pcomm.integration.huggingface.weights import tensor_map
from pcomm.integration.models.language_model import Block, LanguageModel
from pcomm.integration.parallelize import plan_sequences

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")

# Logits have a standard deviation of one; fp32 differs by less than this over four blocks, and a
# part that is missing by more than a hundred times as much.
TOLERANCE = 1e-4
# A delta rule multiplies by what it has summed up, so that rounding grows over the tokens.
OF_GDN = 2e-4
LENGTH = 33

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in SMALL_CONFIGS},
    "llama tied, llama3": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama linear, kv heads": (
        "llama",
        {
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        },
    ),
    "qwen3_moe, probabilities": ("qwen3_moe", {"norm_topk_prob": False, "decoder_sparse_step": 1}),
    "mamba2, limits": ("mamba2", {"time_step_limit": (0.1, 0.9), "use_conv_bias": False}),
    "qwen3_next, no experts": (
        "qwen3_next",
        {"num_experts": 0, "layer_types": ["full_attention", "linear_attention"] * 2},
    ),
}


def tokens() -> Tensor:
    return torch.randint(0, 300, (LENGTH,), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def their_logits(model: nn.Module) -> Tensor:
    logits: Tensor = model(tokens().unsqueeze(0)).logits[0]
    return logits.float()


@torch.no_grad()
def our_logits(model: LanguageModel) -> Tensor:
    return model(tokens(), plan_sequences(model, (0, LENGTH))).float()


def written_again(folder: Path, out: Path, *, carried: bool, max_shard_bytes: int) -> LanguageModel:
    """A directory read and written, with what it says beside the model or without."""
    directory, model = open_directory(folder), load_model(folder)
    fields = directory.config if carried else None
    family, config = write_config(model.config, model.vocabulary.length, carried=fields)
    dtype = model.norm.weight.dtype
    export_model(model, family, config, out, files={}, dtype=dtype, max_shard_bytes=max_shard_bytes)
    return model


def every_tensor(directory: ModelDirectory) -> dict[str, Tensor]:
    with TensorFiles(directory) as files:
        return {name: files.read(name) for name in files.infos}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_before_and_after_writing(case, tmp_path):
    family, changes = CASES[case]
    theirs = write_directory(tmp_path / "theirs", family, max_shard_size="100KB", **changes)
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 1
    expected = their_logits(theirs)
    allowed = OF_GDN if family == "qwen3_next" else TOLERANCE
    model = written_again(
        tmp_path / "theirs", tmp_path / "ours", carried=False, max_shard_bytes=100_000
    )
    torch.testing.assert_close(our_logits(model), expected, rtol=0, atol=allowed)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(again) is type(theirs)
    torch.testing.assert_close(their_logits(again), expected, rtol=0, atol=allowed)


@pytest.mark.parametrize("family", SMALL_CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_directory_comes_back_as_it_was(family, dtype, tmp_path):
    """export(import(d)) is d, bit by bit, and import(export(x)) is x."""
    write_directory(tmp_path / "theirs", family, dtype=dtype)
    model = written_again(
        tmp_path / "theirs", tmp_path / "ours", carried=True, max_shard_bytes=1_000_000
    )
    before, after = (open_directory(tmp_path / name) for name in ("theirs", "ours"))
    assert after.config == before.config
    assert json.loads((tmp_path / "ours/config.json").read_text())["dtype"] == str(dtype)[6:]
    old, new = every_tensor(before), every_tensor(after)
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)
    assert {tensor.dtype for tensor in new.values()} == {dtype}
    again = load_model(tmp_path / "ours")
    assert resolve_model(read_model(after).config) == resolve_model(read_model(before).config)
    for (name, mine), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, other), name


def test_a_configuration_of_transformers_4_comes_back_as_it_was(tmp_path):
    write_directory(tmp_path / "theirs", "llama")
    path = tmp_path / "theirs/config.json"
    fields = json.loads(path.read_text())
    del fields["dtype"], fields["rope_parameters"]
    fields |= {"torch_dtype": "float32", "rope_theta": 10_000.0, "rope_scaling": None}
    path.write_text(json.dumps(fields))
    written_again(tmp_path / "theirs", tmp_path / "ours", carried=True, max_shard_bytes=1_000_000)
    assert json.loads((tmp_path / "ours/config.json").read_text()) == fields


@pytest.mark.parametrize("family", SMALL_CONFIGS)
def test_a_zeroed_mixer_is_seen(family, tmp_path, monkeypatch):
    """The comparison above fails by far when a part is missing: the weights are no blind oracle."""
    expected = their_logits(write_directory(tmp_path, family))
    model = load_model(tmp_path)

    def without_mixer(self: Block, x: Tensor, context: Any) -> Tensor:
        return self._feed_forward(x, context.balance)

    monkeypatch.setattr(Block, "forward", without_mixer)
    assert (our_logits(model) - expected).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("family", SMALL_CONFIGS)
def test_every_row_of_theirs_is_one_row_of_ours(family, tmp_path):
    """A table is a permutation of rows: none twice, none left out, on either side."""
    write_directory(tmp_path, family)
    model, described = load_model(tmp_path), read_model(open_directory(tmp_path))
    tensors = tensor_map(model, described.family)
    for theirs, parts in tensors.users.items():
        rows = sorted(
            row
            for _, segment in parts
            for row in range(segment.their_start, segment.their_start + segment.length)
        )
        assert rows == list(range(tensors.shapes[theirs][0])), theirs
    for name, parameter in model.named_parameters():
        ours = [row for s in tensors.segments[name] for row in range(s.start, s.start + s.length)]
        columns = parameter.shape[-1] if parameter.dim() > 1 else 1
        assert ours == list(range(parameter.numel() // columns)), name


class CountedFile:
    """A safetensors file that counts the bytes of the slices which are taken from it."""

    read_bytes = 0

    def __init__(self, path: Path, framework: str) -> None:
        self._opened = safe_open(path, framework)
        self.keys = self._opened.keys

    def get_slice(self, name: str) -> CountedSlice:
        return CountedSlice(self._opened.get_slice(name))

    def __enter__(self) -> CountedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.__exit__(None, None, None)


class CountedSlice:
    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype

    def __getitem__(self, place: Any) -> Tensor:
        taken: Tensor = self._inner[place]
        CountedFile.read_bytes += taken.nbytes
        return taken


@pytest.mark.parametrize("family", SMALL_CONFIGS)
def test_a_rank_reads_its_own_bytes_and_no_others(family, tmp_path, monkeypatch):
    write_directory(tmp_path, family)
    whole = dict(load_model(tmp_path).named_parameters())
    monkeypatch.setattr(tensors, "safe_open", CountedFile)
    for rank in range(2):
        # Building and reading are local: nobody else is asked.
        place = VirtualCollectives(rank, 2, [], threading.Barrier(1))
        monkeypatch.setattr(CountedFile, "read_bytes", 0)
        model = load_model(tmp_path, collectives=place, experts=place)
        own = sum(parameter.nbytes for parameter in model.parameters())
        assert CountedFile.read_bytes == own < sum(p.nbytes for p in whole.values())
        for name, layout in param_layouts_of(model).items():
            expected = whole[name]
            if layout.layout is not None:
                expected = take_shard(expected, layout.layout, rank, dim=layout.dim)
            assert torch.equal(model.get_parameter(name), expected), name


def test_loading_draws_no_random_numbers(tmp_path):
    """They would take far longer than reading, and change what a program draws afterwards."""
    write_directory(tmp_path, "qwen3_next")
    before = torch.get_rng_state()
    load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_two_ranks_compute_what_one_computes(tmp_path):
    write_directory(tmp_path, "qwen3_next")
    expected = our_logits(load_model(tmp_path))

    def rank(collectives: Any) -> Tensor:
        model = load_model(tmp_path, collectives=collectives)
        with torch.no_grad():
            logits_tv = model(tokens(), plan_sequences(model, (0, LENGTH)))
        gathered: Tensor = collectives.all_gather(logits_tv, dim=1)
        return gathered

    for logits in run_virtual(rank, 2):
        torch.testing.assert_close(logits, expected, rtol=0, atol=OF_GDN)
