"""Models of transformers, tiny, sharded with units that are found, beside one process."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from core_support.tiny_transformers import LONGEST, VOCABULARY, tiny_config, tiny_model
from fsdp_support.trainings import open_two, roles_of
from pcomm.core.errors import PcommError
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import CommPolicy

__all__ = ["compare_foreign", "foreign_classes"]

_TASKS = (
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "CTC",
    "SPEECH_SEQ_2_SEQ",
    "MASKED_IMAGE_MODELING",
    "TEXT_ENCODING",
    "BACKBONE",
)
# The second step has the schedule of the first.
_STEPS, _RANKS = 2, 2
# Elsewhere their forward has no backward. Others would change their means and variances in it.
_ONLY_IN_TRAIN_MODE = ("reformer", "rwkv")


def foreign_classes() -> dict[str, str]:
    """The kind of configuration of each class of model that is tried, by the name of the class."""
    found: dict[str, str] = {}
    for task in _TASKS:
        for ending in ("_MAPPING_NAMES", "_NAMES"):
            names = getattr(modeling_auto, f"MODEL_FOR_{task}{ending}", {})
            for kind, classes in names.items():
                for cls in [classes] if isinstance(classes, str) else classes:
                    found.setdefault(cls, kind)
    return found


def compare_foreign(name: str, rank: int, *, compiles: str = "") -> str:
    """Train a class of model in two shards and, on rank 0, in one process. Collective.

    Args:
        name: Name of the class in transformers.
        rank: This rank of two.
        compiles: Backend of `torch.compile` for each unit, or for a model without any; empty to
            compile nothing.

    Returns:
        `"equal"`, of rank 0 alone; or, with a colon and the reason, `"refused"` or `"not tried"`.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    kind = foreign_classes()[name]
    try:
        model = _build(name, kind)
        inputs = _inputs(model, _STEPS * _RANKS)
    except Exception:
        return "not tried: no tiny model was found"
    expected = copy.deepcopy(model) if rank == 0 else model
    before = copy.deepcopy(expected.state_dict()) if rank == 0 else {}
    with open_two() as groups:
        try:
            sharded = fully_shard(model, roles_of(groups), comm=CommPolicy(max_padding=0.5))
        except PcommError as problem:
            return f"refused: {problem.asked}: {problem.found}"
        if compiles:
            units = [unit.module for unit in sharded._runtime.units.values()]
            # The first is the root, which alone has no blocks.
            for module in units[1:] or units:
                module.compile(backend=compiles)
            graphs = torch._dynamo.utils.counters["stats"]
            before_all = graphs["unique_graphs"]
        optimizer = _optimizer(sharded.parameters())
        losses = []
        for step in range(_STEPS):
            losses.append(_loss(model, inputs, step, rank))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        found = sharded.full_state_dict()
        if compiles and graphs["unique_graphs"] == before_all:
            return "not tried: the compiler makes no graph of its blocks"
        line = str(sharded.report()).splitlines()[0]
        assert line.startswith("units: "), line
    if rank:
        return ""
    optimizer = _optimizer(expected.parameters())
    for step in range(_STEPS):
        for one in range(_RANKS):
            loss = _loss(expected, inputs, step, one)
            (loss / _RANKS).backward()
            if one == rank:
                torch.testing.assert_close(losses[step], loss, rtol=1e-5, atol=1e-7)
        optimizer.step()
        optimizer.zero_grad()
    moved = False
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(
            found[key],
            value,
            rtol=1e-5,
            atol=2e-6,
            equal_nan=True,
            msg=lambda m, k=key: f"{k}: {m}",
        )
        moved = moved or not torch.equal(value, before[key])
    assert moved, "no parameter has changed"
    return "equal"


def _optimizer(parameters: Any) -> torch.optim.AdamW:
    # What is zero but for rounding moves by the sign of the rounding with a smaller eps. What is
    # not used has a gradient of zero in shards and none without, so that decay would tell.
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4, weight_decay=0.0)


def _build(name: str, kind: str) -> nn.Module:
    cls = getattr(transformers, name)
    # Of several parts, the one that this class is for.
    config = tiny_config(cls.config_class or CONFIG_MAPPING[kind], name.endswith("ForCausalLM"))
    return tiny_model(cls, config).train(kind in _ONLY_IN_TRAIN_MODE)


def _inputs(model: nn.Module, number: int) -> list[dict[str, Tensor]]:
    """So many batches, of the first kind of those for any model that this one takes."""
    first: Exception | None = None
    for make in _batches(model):
        batches = [make(torch.Generator().manual_seed(seed)) for seed in range(number)]
        try:
            with torch.no_grad():
                torch.manual_seed(0)
                _output(model(**batches[0]))
        except Exception as problem:
            first = first or problem
        else:
            return batches
    raise first or AssertionError("no batch")


def _batches(model: nn.Module) -> Iterator[Any]:
    def tokens(length: int = 16) -> Any:
        return lambda g: torch.randint(
            4, min(VOCABULARY, _vocabulary(model)), (2, length), generator=g
        )

    def numbers(*shape: int) -> Any:
        return lambda g: torch.randn(2, *shape, generator=g)

    config: Any = model.config
    size = getattr(config, "image_size", 32)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", 3)
    mels = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 16)
    length = getattr(config, "max_length", LONGEST) or LONGEST
    main = getattr(model, "main_input_name", "input_ids")
    shapes: dict[str, list[Any]] = {
        "input_ids": [tokens(), tokens(64)],
        "pixel_values": [
            numbers(channels, height, width),
            numbers(channels, 64, 64),
            numbers(channels, 224, 224),
        ],
        "input_values": [numbers(4000), numbers(length, mels), numbers(1024, mels), numbers(16000)],
        "input_features": [
            numbers(mels, 2 * getattr(config, "max_source_positions", LONGEST)),
            numbers(64, mels),
            numbers(64, getattr(config, "feature_projection_input_dim", 160)),
            numbers(mels, 64),
            numbers(64, 80),
        ],
    }
    for key in dict.fromkeys((main, *shapes)):
        for one in shapes.get(key, ()):
            for other in ((), ("decoder_input_ids",)):
                draws = {key: one, **dict.fromkeys(other, tokens(12))}
                yield lambda g, draws=draws: {name: draw(g) for name, draw in draws.items()}


def _vocabulary(model: nn.Module) -> int:
    config: Any = model.config
    found = getattr(config, "vocab_size", None)
    return found if isinstance(found, int) else VOCABULARY


def _loss(model: nn.Module, inputs: list[dict[str, Tensor]], step: int, rank: int) -> Tensor:
    # A few draw random numbers in forward, also when they do not train.
    torch.manual_seed(10 * step + rank)
    return _output(model(**inputs[step * _RANKS + rank])).float().square().mean()


def _output(output: Any) -> Tensor:
    for name in ("logits", "last_hidden_state", "reconstruction", "feature_maps"):
        found = getattr(output, name, None)
        if isinstance(found, tuple | list) and found:
            found = found[-1]
        if isinstance(found, Tensor):
            return found
    first = output[0]
    assert isinstance(first, Tensor), f"an output of {type(first).__name__}"
    return first
