"""A Hugging Face directory: its files, of which JSON is read. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pcomm.core.errors import ConfigError

__all__ = [
    "CONFIG",
    "ModelDirectory",
    "check_model_folder",
    "check_no_gguf",
    "inside",
    "no_model",
    "open_directory",
]


CONFIG = "config.json"
"""The file that says which model it is."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "*.h5")
# transformers writes what JSON has no number for as an object of one key.
_FLOAT_KEY = "__float__"


@dataclass(frozen=True)
class ModelDirectory:
    """What a directory holds, read as far as JSON goes; see `open_directory`.

    Attributes:
        folder: The directory.
        config: Content of `config.json`.
        shards: Names of the tensors that the index assigns to each file; None for a single file,
            which says itself what it holds. Empty where the directory was opened without weights.
    """

    folder: Path
    config: Mapping[str, Any]
    shards: Mapping[Path, frozenset[str] | None]

    def json(self, name: str) -> dict[str, Any]:
        """The content of an optional JSON file; empty if there is none. Local.

        Raises:
            ConfigError: The file is no JSON object, or lies elsewhere.
        """
        return _read_json(self.folder, name) if _exists(self.folder / name) else {}

    def text(self, name: str) -> str | None:
        """The content of an optional text file; None if there is none. Local.

        Raises:
            ConfigError: The file cannot be read as UTF-8, or lies elsewhere.
        """
        return _read_text(self.folder, name) if _exists(self.folder / name) else None


def open_directory(folder: Path, *, has_weights: bool = True) -> ModelDirectory:
    """Read `config.json` and find the files of the weights. Local; no tensor is read.

    Args:
        folder: The directory: a local one, such as `hf download --local-dir` writes.
        has_weights: False to read the description alone, of a directory without weights.

    Raises:
        ConfigError: The directory, its `config.json` or its weights are missing or damaged, the
            weights are pickles, or a file lies outside of the directory.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"model directory {folder}",
            found="a file" if folder.exists() else "no such folder",
            why="A model is read from a folder with config.json and safetensors files. Nothing is "
            "downloaded.",
            fix="Give the path of such a folder; `hf download NAME --local-dir DIR` makes one.",
        )
    config = _read_json(folder, CONFIG)
    shards = _find_shards(folder) if has_weights else {}
    return ModelDirectory(folder, config, shards)


def check_model_folder(path: Path) -> None:
    """Refuse at once what cannot be a model: neither a run nor a directory. Local.

    Raises:
        ConfigError: There is no such folder, or it has neither checkpoints nor a `config.json`.
    """
    if not (path / CONFIG).is_file() and not any(path.glob("checkpoints/step-*[0-9]")):
        raise no_model(path)


def no_model(path: Path) -> ConfigError:
    """The error for a path that holds no model. Local.

    Raises:
        ConfigError: It is a GGUF file, or has one.
    """
    check_no_gguf(path)
    absent, name, folder = "a file" if path.exists() else "no such folder", "NAME", "DIR"
    is_name = (
        not path.is_absolute() and len(path.parts) == 2 and path.parts[0] not in ("..", "runs")
    )
    if is_name and not path.parent.exists():
        # As models of the hub are called; in a folder that is there, a run or a copy is meant.
        name, folder = str(path), f"models/{path.name}"
    return ConfigError(
        f"model {path}",
        found="neither a checkpoint of a run nor a config.json" if path.is_dir() else absent,
        why="A model is a run of `pcomm train` that has been saved, or a Hugging Face directory. "
        "Nothing is downloaded, and GGUF is not read.",
        fix="Give the --out folder of a `pcomm train` that has reached a checkpoint, or a "
        "directory with config.json, tokenizer.json and safetensors; "
        f"`hf download {name} --local-dir {folder}` makes one.",
    )


def check_no_gguf(path: Path) -> None:
    """Refuse a GGUF file, or a folder that holds one. Local.

    Args:
        path: File or folder that was given as a model, and has no weights that are read.

    Raises:
        ConfigError: It is one of the two; says how to get weights that are read.
    """
    if path.suffix.lower() == ".gguf" and path.exists():
        folder, name, found = path.parent, path.name, "a GGUF file"
    elif names := sorted(one.name for one in path.glob("*.gguf")):
        folder, name, found = path, names[0], f"a GGUF file, {names[0]}, and no safetensors"
    else:
        return
    raise ConfigError(
        f"model {path}",
        found=found,
        why="GGUF is not read: its weights are in formats of llama.cpp.",
        fix="Take the model as its makers gave it, `hf download NAME --local-dir DIR`; or convert "
        "it with transformers and its tokenizer likewise, `AutoModelForCausalLM.from_pretrained("
        f"{str(folder)!r}, gguf_file={name!r}).save_pretrained(NEW)`.",
    )


def inside(folder: Path, name: object, source: str) -> Path:
    """The file `name` of the directory, if it lies inside of it. Local.

    A download cache keeps `snapshots/REVISION/` as links into the folder `blobs/` two levels above;
    these links count as inside.

    Args:
        folder: The directory.
        name: Name of the file, as `source` has it.
        source: Name of what names the file, for the error.

    Raises:
        ConfigError: `name` is no name of a file, there is no such file, or it is a link that leads
            out of the directory.
    """
    if not isinstance(name, str) or Path(name).name != name or name in ("", "..") or "\0" in name:
        raise ConfigError(
            f"model directory {folder}",
            found=f"{source} names the file {name!r:.200}",
            why="Only files of the directory itself are read, whatever its files say.",
            fix="Take the directory from a source that you trust, or correct the name.",
        )
    path = folder / name
    if not path.is_file():
        raise ConfigError(
            f"model directory {folder}",
            found=f"no file {name}" if not path.is_symlink() else f"{name}, a link to nothing",
            why=f"It is named by {source}.",
            fix=f"Copy {name} into the directory; a download that was cut off leaves such gaps.",
        )
    real, roots = path.resolve(), [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        roots.append(folder.resolve().parent.parent / "blobs")
    if not any(real.is_relative_to(root) for root in roots):
        raise ConfigError(
            f"model directory {folder}",
            found=f"{name}, a link to {real}",
            why="It leads out of the directory, so another file of this machine would be read.",
            fix="Copy the directory with `cp -rL` if you trust the link.",
        )
    return path


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _find_shards(folder: Path) -> dict[Path, frozenset[str] | None]:
    if _exists(folder / _SINGLE):
        return {inside(folder, _SINGLE, CONFIG): None}
    if not _exists(folder / _INDEX):
        raise _no_weights(folder)
    weight_map = _read_json(folder, _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(
            f"model directory {folder}",
            found=f"{_INDEX} without a weight_map",
            why="It says in which file each tensor is.",
            fix="Copy the index again from where the directory came from.",
        )
    names: dict[Path, set[str]] = {}
    for tensor, file in weight_map.items():
        names.setdefault(inside(folder, file, f"{_INDEX}, for {tensor},"), set()).add(tensor)
    return {path: frozenset(tensors) for path, tensors in names.items()}


def _no_weights(folder: Path) -> ConfigError:
    pickles = sorted({path.name for pattern in _PICKLES for path in folder.glob(pattern)})
    if pickles:
        return ConfigError(
            f"model directory {folder}",
            found=f"{', '.join(pickles[:5])}, and no safetensors file",
            why="These are pickles, or formats like them: to read one is to run the program that "
            "it holds, so none is opened.",
            fix="Convert it where that is no danger: `AutoModelForCausalLM.from_pretrained(DIR)"
            ".save_pretrained(NEW)` of transformers writes safetensors.",
        )
    check_no_gguf(folder)
    return ConfigError(
        f"model directory {folder}",
        found=f"no {_SINGLE} and no {_INDEX}",
        why="The weights are read from safetensors files with these names.",
        fix="Copy them into the directory; a download that was cut off leaves such gaps.",
    )


def _read_text(folder: Path, name: str) -> str:
    path = inside(folder, name, "the format")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(folder, name, str(error)) from error


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    # Editors of Windows begin a file with a byte order mark.
    text = _read_text(folder, name).removeprefix("\ufeff")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(folder, name, f"{error}") from error
    if not isinstance(content, dict):
        raise _unreadable(folder, name, f"a {type(content).__name__} in place of a JSON object")
    decoded: dict[str, Any] = _with_floats(content)
    return decoded


def _with_floats(value: Any) -> Any:
    """`value` with `{"__float__": "Infinity"}` as the number that it stands for."""
    if isinstance(value, dict):
        if set(value) == {_FLOAT_KEY} and value[_FLOAT_KEY] in ("Infinity", "-Infinity", "NaN"):
            return float(value[_FLOAT_KEY])
        return {key: _with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    return value


def _unreadable(folder: Path, name: str, found: str) -> ConfigError:
    return ConfigError(
        f"model directory {folder}",
        found=f"{name}: {found}",
        why="The file is damaged, or was cut off.",
        fix=f"Copy {name} again from where the directory came from.",
    )
