"""Small models, and the groups, batches and steps that tests of sharded training share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pcomm.core.groups.group import Group
from pcomm.core.groups.open_groups import Groups, open_groups
from pcomm.core.topology import Topology
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.checkpoint import (
    load_checkpoint,
    model_shard_views,
    optimizer_shard_views,
    save_checkpoint,
)
from pcomm.fsdp.plan.units import Units
from pcomm.fsdp.runtime.param_group import ParamGroup
from pcomm.fsdp.settings import CommPolicy, ReshardPolicy, Roles
from pcomm.fsdp.sharded import Sharded

__all__ = [
    "MAX_NORM",
    "MICRO_BATCHES",
    "STAGES",
    "STEPS",
    "STRATEGIES",
    "TOKENS",
    "ZERO",
    "Block",
    "SmallModel",
    "accumulated_step",
    "check_gradients",
    "check_state",
    "flat_groups",
    "model_of",
    "no_progress_monitor",
    "on_gloo_and_nccl",
    "one_rank_groups",
    "open_two",
    "replicated",
    "roles_of",
    "shard",
    "step_of",
    "step_on_tokens",
    "throw",
    "tokens",
    "train_and_save",
    "train_one_process",
    "train_sharded",
]


# B batch, T tokens, D model dim, V vocabulary

Recompute = Literal["no", "blocks", "reentrant", "inside", "all blocks at once"]


class Block(nn.Module):
    """A norm and two layers, with a width of its own kind for each parameter."""

    def __init__(self, dim: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim + 1)
        self.down = nn.Linear(3 * dim + 1, dim, bias=False)
        self.recompute = recompute

    def forward(self, x_BTD: Tensor) -> Tensor:
        """`x + mlp(norm(x))`."""
        if self.recompute:
            y_BTD: Tensor = checkpoint(self._mlp, x_BTD, use_reentrant=False)
            return x_BTD + y_BTD
        return x_BTD + self._mlp(x_BTD)

    def _mlp(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.down(F.gelu(self.up(self.norm(x_BTD))))
        return y_BTD


class SmallModel(nn.Module):
    """Embedding, blocks, norm and head.

    Args:
        dim: Model dim.
        num_blocks: Number of blocks.
        vocabulary: Number of tokens.
        is_tied: True if the head's weight is the embedding's.
        recompute: Part of the model that is computed again in backward.
    """

    def __init__(
        self,
        *,
        dim: int = 5,
        num_blocks: int = 4,
        vocabulary: int = 7,
        is_tied: bool = False,
        recompute: Recompute = "no",
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(
            Block(dim, recompute=recompute == "inside") for _ in range(num_blocks)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=not is_tied)
        self.register_buffer("scale", torch.tensor(0.7))
        if is_tied:
            self.head.weight = self.embedding.weight
        self.recompute = recompute

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits `[B, T, V]`."""
        x_BTD = self.embedding(tokens_BT)
        if self.recompute == "all blocks at once":
            x_BTD = checkpoint(self._blocks, x_BTD, use_reentrant=False)
        else:
            x_BTD = self._blocks(x_BTD)
        logits_BTV: Tensor = self.head(self.norm(x_BTD)) * self.scale
        return logits_BTV

    def loss(self, tokens_BT: Tensor) -> Tensor:
        """Mean cross-entropy of each token given those before it."""
        logits_BTV = self(tokens_BT[:, :-1])
        return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())

    def _blocks(self, x_BTD: Tensor) -> Tensor:
        for block in self.blocks:
            if self.recompute in ("blocks", "reentrant"):
                x_BTD = checkpoint(block, x_BTD, use_reentrant=self.recompute == "reentrant")
            else:
                x_BTD = block(x_BTD)
        return x_BTD


STRATEGIES = {
    "zero3": ReshardPolicy.zero3(),
    "zero3, reduced once": ReshardPolicy.zero3(reduce="step"),
    "kept for backward": ReshardPolicy(keep="backward"),
    "zero2": ReshardPolicy.zero2(),
    "zero1": ReshardPolicy.zero1(),
}
"""Reshard policies by name."""

ZERO = ("zero3", "zero2", "zero1")
"""Names of the three stages of ZeRO."""

STAGES = ("zero3", "zero3, reduced once", "zero2", "zero1")
"""Those, and ZeRO-3 with one reduce a step."""

STEPS, MICRO_BATCHES, MAX_NORM = 3, 2, 0.3

TOKENS = torch.tensor([[1, 2, 3, 4, 5, 6]])
"""A batch for a `SmallModel`, the same on all ranks."""


def open_two(size: int = 2) -> Groups:
    """Groups `dp[gather]` and `dp[reduce]` over all ranks. Collective.

    Args:
        size: Number of ranks.
    """
    return open_groups(Topology({"dp": size}), [("dp", "gather"), ("dp", "reduce")])


def roles_of(groups: Groups) -> Roles:
    """The roles of the groups of `open_two`. Local."""
    return Roles(groups["dp", "gather"], groups["dp", "reduce"])


def shard(
    model: nn.Module, groups: Groups, *, units: Units = (Block,), **options: object
) -> Sharded:
    """`fully_shard` over the groups of `open_two`. Collective.

    Args:
        model: The model.
        groups: The groups.
        units: The units.
        options: Further arguments of `fully_shard`.
    """
    return fully_shard(model, roles_of(groups), units=units, **options)  # type: ignore[arg-type]


@contextmanager
def replicated(shards: int, replicas: int) -> Iterator[Roles]:
    """Roles of parameters that some ranks shard and as many groups of them hold. Collective.

    Args:
        shards: Number of ranks that share a whole model.
        replicas: Number of whole models.
    """
    topology = Topology({"rep": replicas, "shard": shards}, order=("shard", "rep"))
    with open_groups(topology, ["shard", ("shard", "reduce"), "rep"]) as groups:
        yield Roles(groups["shard"], groups["shard", "reduce"], groups["rep"])


def flat_groups(sharded: Sharded) -> list[ParamGroup]:
    """The parameter groups that communicate or convert, in the order of the units. Local."""
    return list(sharded._runtime.groups.values())


def model_of(dtype: torch.dtype = torch.float64, *, seed: int = 0, **options: object) -> SmallModel:
    """A `SmallModel`, the same for equal arguments. Local.

    Args:
        dtype: Dtype of its parameters.
        seed: Seed of its parameters.
        options: Arguments of `SmallModel`.
    """
    torch.manual_seed(seed)
    return SmallModel(**options).to(dtype)  # type: ignore[arg-type]


def no_progress_monitor() -> None:
    """Let bars of progress, such as torch.compile and transformers make, start no thread. Local.

    It would live as long as the process, and be what a test has left in a rank.
    """
    if find_spec("tqdm") is not None:
        import_module("tqdm").tqdm.monitor_interval = 0


def tokens(step: int, micro: int, rank: int) -> Tensor:
    """The batch `[2, 6]` of one rank in a micro-batch of a step. Local."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(7, (2, 6), generator=generator)


def step_of(model: SmallModel, sharded: Sharded, step: int, rank: int) -> float:
    """Forward and backward of each micro-batch of a step; the sum of losses. Collective."""
    total = 0.0
    for micro in range(MICRO_BATCHES):
        with sharded.accumulate(is_last=micro == MICRO_BATCHES - 1):
            loss = model.loss(tokens(step, micro, rank))
            loss.backward()
        total += loss.item()
    return total


def step_on_tokens(model: SmallModel, sharded: Sharded) -> float:
    """Forward and backward of `TOKENS` in a step of one micro-batch; the loss. Collective."""
    sharded.zero_grad()
    loss = model.loss(TOKENS)
    loss.backward()
    return loss.item()


def accumulated_step(model: SmallModel, sharded: Sharded) -> None:
    """Forward and backward of `TOKENS` in each micro-batch of a step. Collective."""
    sharded.zero_grad()
    for micro in range(MICRO_BATCHES):
        with sharded.accumulate(is_last=micro == MICRO_BATCHES - 1):
            model.loss(TOKENS).backward()


def throw(*_: object) -> NoReturn:
    """The mistake of a user's model. Local.

    Raises:
        ArithmeticError: Always.
    """
    raise ArithmeticError("a bad batch")


def train_one_process(model: SmallModel, batches: Sequence[int]) -> tuple[list[float], list[float]]:
    """Train on the batches of some ranks, in this process and without sharding. Local.

    Returns:
        Losses and gradient norms by step.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.03)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        means = []
        for micro in range(MICRO_BATCHES):
            means.append(torch.stack([model.loss(tokens(step, micro, r)) for r in batches]).mean())
            means[-1].backward()
        norms.append(nn.utils.clip_grad_norm_(parameters, MAX_NORM).item())
        optimizer.step()
        losses.append(sum(mean.item() for mean in means))
    return losses, norms


def train_sharded(
    model: SmallModel, sharded: Sharded, rank: int
) -> tuple[list[float], list[float]]:
    """The same on the batches of this rank, whose losses it returns. Collective."""
    optimizer = torch.optim.AdamW([p for p in sharded.parameters() if p.requires_grad], lr=0.03)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(step_of(model, sharded, step, rank))
        norms.append(sharded.clip_grad_norm(MAX_NORM).item())
        optimizer.step()
    return losses, norms


def check_state(state: dict[str, Tensor], expected: nn.Module) -> None:
    """Compare a full state dict with that of a model, in fp64. Local.

    Raises:
        AssertionError: They differ.
    """
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-10, msg=name)


def check_gradients(sharded: Sharded, reference: nn.Module, what: str = "") -> None:
    """Compare whole gradients with those of a model, in fp64; one that it lacks is zero or none.

    Raises:
        AssertionError: They differ.
    """
    found = sharded.full_gradients()
    for name, parameter in reference.named_parameters():
        message = f"{what}: {name}"
        if parameter.grad is None:
            assert not found.get(name, torch.zeros(())).count_nonzero(), message
        else:
            torch.testing.assert_close(
                found[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=message
            )


# Divides by 1, 2, 3 and 4 ranks.
_BATCH = 12


def train_and_save(
    size: int, reshard: ReshardPolicy, folder: Path, steps: range, replicas: int = 1
) -> dict[str, Tensor]:
    """Train some steps, from a checkpoint if they begin in the middle, and save.

    Collective over the world, which has `size` ranks; alone, there need not be one.

    Args:
        size: Number of ranks.
        reshard: Time until which parameters and gradients stay unsharded.
        folder: Folder of the checkpoint.
        steps: Numbers of the steps, from 0.
        replicas: Number of ranks that hold the same shard.

    Returns:
        The whole parameters afterwards.
    """
    rank = dist.get_rank() if size > 1 else 0
    topology = Topology({"rep": replicas, "dp": size // replicas}, order=("dp", "rep"))
    torch.manual_seed(steps.start)
    model = SmallModel(is_tied=True).double()
    with open_groups(topology, ["dp", ("dp", "reduce"), "rep", "rep_dp"]) as groups:
        sharded = fully_shard(
            model,
            Roles(groups["dp"], groups["dp", "reduce"], groups["rep"]),
            units=[Block],
            reshard=reshard,
            # Rows are cut on three ranks.
            comm=CommPolicy(max_padding=0.0 if size == 3 else 0.1),
        )
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.03)
        views = model_shard_views(sharded) | optimizer_shard_views(sharded, optimizer)
        if steps.start:
            load_checkpoint(folder, views, groups["rep_dp"], sharded=sharded)
        for step in steps:
            sharded.zero_grad()
            generator = torch.Generator().manual_seed(step)
            batch = torch.randint(7, (_BATCH, 5), generator=generator)
            model.loss(batch.chunk(size)[rank]).backward()
            optimizer.step()
        save_checkpoint(folder, views, groups["rep_dp"])
        return sharded.full_state_dict()


on_gloo_and_nccl = pytest.mark.parametrize(
    "kind",
    [
        "gloo",
        pytest.param(
            "nccl",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU"),
            ],
        ),
    ],
)
"""Runs a test on the CPU, and on a GPU where there is one."""


@contextmanager
def one_rank_groups(backend: str, folder: Path) -> Iterator[Groups]:
    """`dp[gather]` and `dp[reduce]`, each with a communicator of its own; `open_groups` makes none.

    Args:
        backend: `"gloo"` or `"nccl"`.
        folder: An empty one, in which the rank meets itself.
    """
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        members = {role: dist.new_group([0], backend=backend) for role in ("gather", "reduce")}
        groups = [Group("dp", (0,), pg, role=role) for role, pg in members.items()]
        yield Groups(groups, owned=list(members.values()))
    finally:
        dist.destroy_process_group()
