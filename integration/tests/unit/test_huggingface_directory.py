"""Directories that are damaged, hostile or of another model: errors that name file and tensor."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from integration_support.huggingface_directories import write_directory, write_tokenizer
from pcomm.core import PcommError
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.integration import llm
from pcomm.integration.huggingface import (
    export_model,
    load_model,
    open_directory,
    read_tokenizer,
    weights,
    write_config,
)

pytest.importorskip("transformers", reason="transformers writes the directories here")

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    write_directory(folder, "llama", num_hidden_layers=1)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A directory of one file of weights, to be damaged."""
    for path in original.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def put(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of the file, or take them out."""
    content = {**load_file(folder / FILE), **tensors}
    save_file({name: x for name, x in content.items() if x is not None}, folder / FILE)


def shard(folder: Path, **weight_map: str) -> None:
    """Move the file behind an index."""
    names = dict.fromkeys(load_file(folder / FILE), "a.safetensors")
    (folder / FILE).rename(folder / "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {**names, **weight_map}}))


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def outside(folder: Path) -> Path:
    path = folder.parent / f"{folder.name}-outside.safetensors"
    path.write_bytes((folder / FILE).read_bytes())
    return path


def link_out(folder: Path, name: str) -> None:
    target = folder.parent / f"{folder.name}-{name}"
    (folder / name).rename(target)
    (folder / name).symlink_to(target)


DAMAGES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no config": (lambda f: (f / "config.json").unlink(), ("no file config.json",)),
    "config cut off": (lambda f: cut(f / "config.json", 20), ("config.json", "damaged")),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), ("a list", "JSON object")),
    "config nested too deep": (
        lambda f: (f / "config.json").write_text('{"a":' * 100_000),
        ("config.json", "damaged"),
    ),
    "config outside": (lambda f: link_out(f, "config.json"), ("config.json, a link to", "cp -rL")),
    "weights outside": (
        lambda f: link_out(f, FILE),
        (f"{FILE}, a link to", "out of the directory"),
    ),
    "weights cut off": (lambda f: cut(f / FILE, 20_000), (FILE, "cut off")),
    "header cut off": (lambda f: cut(f / FILE, 30), (FILE, "cut off")),
    "header too long": (
        lambda f: (f / FILE).write_bytes(struct.pack("<Q", 1 << 40) + b"{}"),
        (FILE, "damaged"),
    ),
    "weights empty": (lambda f: cut(f / FILE, 0), (FILE, "damaged")),
    "weights are a pickle": (
        lambda f: torch.save({Q: torch.zeros(1)}, f / FILE),
        (FILE, "no safetensors file"),
    ),
    "weights are a folder": (
        lambda f: ((f / FILE).unlink(), (f / FILE).mkdir()),
        (f"no file {FILE}",),
    ),
    "tensor missing": (lambda f: put(f, **{Q: None}), (f"no tensor {Q}", "llama")),
    "tensor unexpected": (
        lambda f: put(f, **{"model.layers.9.x": torch.zeros(2)}),
        (f"{FILE}: the tensor model.layers.9.x", "does not have"),
    ),
    "tensor transposed": (
        lambda f: put(f, **{Q: torch.zeros(48, 64)}),
        (f"{FILE}: {Q} of shape [48, 64]", "[64, 48]"),
    ),
    "tensor of int8": (
        lambda f: put(f, **{Q: torch.zeros(64, 48, dtype=torch.int8)}),
        (f"{FILE}: {Q} of dtype I8", "quantised"),
    ),
    "tensor of fp64": (
        lambda f: put(f, **{Q: torch.zeros(64, 48).double()}),
        (f"{Q} of dtype F64",),
    ),
    "index outside": (
        lambda f: (
            (outside(f), shard(f, **{Q: f"../{outside(f).name}"})) if (f / FILE).exists() else None
        ),
        (INDEX, Q, "names the file '../"),
    ),
    "index absolute": (lambda f: shard(f, **{Q: "/etc/passwd"}), (INDEX, Q, "'/etc/passwd'")),
    "index of no file": (lambda f: shard(f, **{Q: "b.safetensors"}), ("no file b.safetensors", Q)),
    "index of a number": (lambda f: shard(f, **{Q: 3}), (INDEX, Q, "names the file 3")),
    "index without a map": (
        lambda f: ((f / FILE).unlink(), (f / INDEX).write_text("{}")),
        (INDEX, "weight_map"),
    ),
    "index of more": (
        lambda f: shard(f, more="a.safetensors"),
        ("a.safetensors without the tensor more", "index"),
    ),
    "same tensor twice": (
        lambda f: (
            save_file({Q: torch.zeros(64, 48), "y": torch.zeros(1)}, f / "b.safetensors"),
            shard(f, y="b.safetensors"),
        ),
        (f"the tensor {Q} in a.safetensors and in b.safetensors",),
    ),
    "only pickles": (
        lambda f: (f / FILE).rename(f / "pytorch_model.bin"),
        ("pytorch_model.bin", "pickles", "save_pretrained"),
    ),
    "only gguf": (lambda f: (f / FILE).rename(f / "m.gguf"), ("m.gguf", "gguf_file='m.gguf'")),
    "no weights": (lambda f: (f / FILE).unlink(), (f"no {FILE}", INDEX)),
    "other family": (lambda f: config(f, model_type="gpt2"), ("model_type", "'gpt2'", "llama")),
    "no family": (lambda f: config(f, model_type=None), ("model_type", "no such field")),
    "another head": (
        lambda f: config(f, architectures=["LlamaForSequenceClassification"]),
        ("architectures", "LlamaForCausalLM"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_directory_is_refused_by_name(damage, folder):
    spoil, parts = DAMAGES[damage]
    spoil(folder)
    with pytest.raises((ConfigError, UnsupportedError)) as raised:
        load_model(folder)
    message = str(raised.value)
    assert str(folder) in message
    for part in parts:
        assert part in message
    assert raised.value.why
    assert raised.value.fix


def test_a_pickle_beside_the_weights_is_not_opened(folder):
    """Its content would end the process."""

    class Ends:
        def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
            return os._exit, (3,)

    torch.save(Ends(), folder / "pytorch_model.bin")
    (folder / "modeling_llama.py").write_text("raise SystemExit(3)")
    config(folder, auto_map={"AutoModelForCausalLM": "modeling_llama.Model"})
    assert load_model(folder).num_parameters() > 0


def test_links_of_a_download_cache_count_as_inside(folder):
    snapshot, blobs = folder / "snapshots" / "abc", folder / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in [path for path in folder.iterdir() if path.is_file()]:
        path.rename(blobs / f"hash-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/hash-{path.name}")
    assert load_model(snapshot).num_parameters() > 0


def test_what_is_no_directory():
    with pytest.raises(ConfigError, match="no such folder\nA model is read from a folder"):
        open_directory(Path("gpt2"))


@pytest.mark.parametrize("rows", [128, 300, 4096])
def test_the_head_of_a_tied_model_may_be_there_if_it_is_the_embedding(rows, folder, monkeypatch):
    """Otherwise transformers computes with it, and others with the embedding."""
    config(folder, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
        load_model(folder)
    # 300 rows, in three pieces or in one.
    monkeypatch.setattr(weights, "_ROWS", rows)
    embedding = load_file(folder / FILE)[EMBEDDING]
    last = embedding.clone()
    last[-1, -1] += 1
    for head in (embedding[:-1].clone(), embedding.half(), last):
        put(folder, **{HEAD: head})
        with pytest.raises(ConfigError, match=r"lm_head\.weight is not"):
            load_model(folder)
    put(folder, **{HEAD: embedding.clone()})
    model = load_model(folder)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, embedding)


@pytest.mark.parametrize(
    ("dtype", "found"),
    [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int64, "I64"), (torch.bool, "BOOL")],
)
@pytest.mark.parametrize("is_alone", [True, False])
def test_llm_refuses_other_dtypes_by_the_name_of_the_tensor(dtype, found, is_alone, folder):
    write_tokenizer(folder, ["a b "])
    names = [NORM] if is_alone else list(load_file(folder / FILE))
    put(
        folder,
        **{name: x.to(dtype) for name, x in load_file(folder / FILE).items() if name in names},
    )
    with pytest.raises(UnsupportedError, match=f"{FILE}: .* of dtype {found}"):
        llm.load_model(folder)


def test_llm_draws_no_random_numbers(folder):
    write_tokenizer(folder, ["a b "])
    before = torch.get_rng_state()
    llm.load_model(folder)
    assert torch.equal(torch.get_rng_state(), before)


def halves(folder: Path, norm: torch.Tensor) -> None:
    """All tensors in fp16, but the norm."""
    put(folder, **{name: x.half() for name, x in load_file(folder / FILE).items()})
    put(folder, **{NORM: norm})


def test_numbers_that_the_dtype_does_not_have_are_refused(folder):
    norm = torch.ones(48)
    # 65,504 is the largest number of fp16, and 65,519 the last that rounds to it.
    norm[3], norm[4] = 65519.0, -65504.0
    halves(folder, norm)
    model = load_model(folder)
    assert (model.norm.weight.dtype, model.norm.weight[3]) == (torch.float16, 65504)
    for value, infinity in ((65520.0, 0.0), (-1e6, 0.0), (1e6, float("inf"))):
        norm[5], norm[6] = value, infinity
        put(folder, **{NORM: norm})
        with pytest.raises(ConfigError, match=rf"numbers in {NORM} that are infinite as float16"):
            load_model(folder)
        assert load_model(folder, dtype=torch.float32).norm.weight[5] == value


def test_numbers_that_the_dtype_does_not_have_are_not_written(folder, tmp_path_factory):
    put(folder, **{NORM: torch.full((48,), 65520.0)})
    model, out = load_model(folder), tmp_path_factory.mktemp("written") / "out"
    family, fields = write_config(model.config, 300)
    with pytest.raises(ConfigError, match=f"{NORM}: numbers that are infinite as float16"):
        export_model(model, family, fields, out, files={}, dtype=torch.float16)
    assert not list(out.parent.iterdir())
    export_model(model, family, fields, out, files={}, dtype=torch.bfloat16)
    assert load_file(out / FILE)[NORM][0] == 65536


def test_an_infinity_of_the_file_is_a_weight_and_nan_is_none(folder):
    norm = torch.ones(48)
    norm[7] = float("-inf")
    halves(folder, norm)
    assert load_model(folder).norm.weight[7] == float("-inf")
    norm[8] = float("nan")
    put(folder, **{NORM: norm})
    with pytest.raises(ConfigError, match=f"{FILE}: NaN in {NORM}"):
        load_model(folder)


def test_a_tokenizer_that_is_missing_or_damaged(folder):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json") as raised:
        read_tokenizer(open_directory(folder))
    # Which are refused as well.
    assert "token ids" not in raised.value.fix
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ConfigError, match=r"tokenizer\.json: "):
        read_tokenizer(open_directory(folder))


def test_files_stay_closed_after_an_error(folder):
    """A process that is asked for many bad directories keeps no descriptor of them."""
    put(folder, **{Q: None})
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(PcommError):
            load_model(folder)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_byte_order_mark_before_json_is_no_damage(folder):
    path = folder / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_model(folder).vocabulary
