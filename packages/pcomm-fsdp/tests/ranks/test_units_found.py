"""Units that the call finds: models of other libraries train as in one process."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from core_support.works_with import check_outcome, models
from fsdp_support.foreign_models import compare_foreign, foreign_classes
from fsdp_support.trainings import SmallModel, model_of, no_progress_monitor
from pcomm.core.testing.on_ranks import ranks
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.plan.unit_choice import choose_units

no_progress_monitor()

# One for each way to be different; the long form tries all.
SOME = (
    "LlamaForCausalLM",
    "GPT2LMHeadModel",  # tied head, Conv1D
    "MixtralForCausalLM",  # experts as one parameter
    "Qwen3NextForCausalLM",  # layers of two kinds
    "Zamba2ForCausalLM",  # a block whose weights several layers share
    "AlbertForMaskedLM",  # one layer, used again and again
    "T5ForConditionalGeneration",  # two stacks, one embedding
    "ResNetForImageClassification",
    "WhisperForConditionalGeneration",
)
# Compiling takes most of the time: experts behind layers of two kinds. A dense class is compiled in
# test_compiled.py.
COMPILED = ("Qwen3NextForCausalLM",)


@pytest.mark.parametrize("name", models("pcomm-fsdp", foreign_classes(), SOME))
@ranks(2)
def test_works_with_a_class_of_transformers_as_one_process(rank: int, name: str) -> None:
    found = compare_foreign(name, rank)
    if rank == 0:
        check_outcome("pcomm-fsdp", name, found)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in COMPILED else pytest.mark.soak) for n in foreign_classes()],
)
@ranks(2)
def test_compiled_blocks_train_as_in_one_process(rank: int, name: str) -> None:
    torch._dynamo.reset()
    found = compare_foreign(name, rank, compiles="eager")
    torch._dynamo.reset()
    assert found in ("", "equal") or (name not in SOME and "differs" not in found), found


class Basic(nn.Module):
    """A block as torchvision's ResNets have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))


class Stages(nn.Module):
    """Stages of different classes of containers, as in vision and diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.stages = nn.ModuleList(nn.Sequential(Basic(8), Basic(8)) for _ in range(2))
        self.middle = Basic(8)
        self.head = nn.Linear(8, 10)


class Single(nn.Module):
    """Blocks that stand alone."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = Basic(4), Basic(8), Basic(4)
        self.skip = nn.Linear(2, 2)


class Named(SmallModel):
    """It names the class of its embedding too, as some models of transformers do."""

    _no_split_modules = ("Block", "Embedding", "NoneOfThese")


class Embeddings(nn.Module):
    """It is a unit of its own, with an embedding that others call by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.words = nn.LayerNorm(2), nn.Embedding(4, 2)


class HandsOut(Stages):
    """It puts images among tokens, so it calls the input embedding."""

    _no_split_modules = ("Basic", "Embeddings")

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.words


def test_units_are_what_a_model_names_or_repeats() -> None:
    for model, expected, words in (
        (
            Named(),
            "embedding,blocks.0,blocks.1,blocks.2,blocks.3",
            "1 Embedding, 4 Block, by its _no",
        ),
        (Named(is_tied=True), "blocks.0,blocks.1,blocks.2,blocks.3", "4 Block, by its _no_split"),
        (SmallModel(), "blocks.0,blocks.1,blocks.2,blocks.3", "4 Block, by what its lists"),
        (Stages(), "stages.0.0,stages.0.1,stages.1.0,stages.1.1", "4 Basic, by what its lists"),
        (
            HandsOut(),
            "stages.0.0,stages.0.1,stages.1.0,stages.1.1,middle,embeddings.words",
            "5 Basic, 1 Embedding, by its _no_split",
        ),
        (Single(), "down,middle,up", "3 Basic, by its most frequent block"),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), "0,2", "2 Linear"),
        (nn.Linear(2, 2), "", "none, since nothing in the model is repeated"),
    ):
        modules, line = choose_units(model)
        names = {module: name for name, module in model.named_modules()}
        assert ",".join(names[module] for module in modules) == expected
        assert line.startswith("units: ")
        assert words in line


@ranks(2)
def test_what_was_chosen_is_told(rank: int) -> None:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("pcomm.fsdp")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        mesh = init_device_mesh("cpu", (2,))
        sharded = fully_shard(model_of(torch.float32), mesh)
        other = fully_shard(model_of(torch.float32), mesh, units=[nn.Linear])
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    line = "units: 4 Block, by what its lists of modules repeat"
    assert f"SmallModel: {line}" in told
    assert str(sharded.report()).startswith(line)
    assert "units: " not in str(other.report())
    assert {plan.unit for plan in sharded.plans} == {"(root)", *(f"blocks.{n}" for n in range(4))}
    for one in (sharded, other):
        one.close()
