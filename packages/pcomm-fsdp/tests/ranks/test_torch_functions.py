"""Torch's own functions around a sharded model: the rows of the page about them, each of them run.

A test of the tools compares these rows with those of
`docs/how-to/torch-functions-around-a-sharded-model.md`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdp_support.trainings import Block, SmallModel, check_gradients, open_two, roles_of, tokens
from pcomm.core.errors import PcommError
from pcomm.core.testing.on_ranks import ranks
from pcomm.fsdp._fully_shard import fully_shard
from pcomm.fsdp.settings import Roles
from pcomm.fsdp.sharded import Sharded

# Beyond 2 MiB of fp64, and no multiple of anything.
DIM, VOCABULARY = 97, 301
SMALL = 11, 38
FULL = dcp_state.StateDictOptions(full_state_dict=True)


def model_with_cut_root(*, is_small: bool = False) -> SmallModel:
    torch.manual_seed(0)
    dim, vocabulary = SMALL if is_small else (DIM, VOCABULARY)
    # The embedding is most of the root then, and cut.
    return SmallModel(dim=dim, vocabulary=vocabulary, is_tied=is_small).double()


@dataclass
class Case:
    """A sharded model that has had a backward, and the whole one with the same gradients."""

    rank: int
    roles: Roles
    folder: Path
    model: SmallModel
    sharded: Sharded
    whole: SmallModel

    def backward(self, scale: float = 1.0) -> None:
        (self.model.loss(tokens(0, 0, self.rank)) * scale).backward()
        (sum(self.whole.loss(tokens(0, 0, rank)) for rank in (0, 1)) / 2).backward()  # type: ignore[union-attr]

    def check_gradients(self) -> None:
        check_gradients(self.sharded, self.whole)

    def check_norm(self, found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
        self.check_gradients()

    def check_parameters(self) -> None:
        found = self.sharded.full_state_dict()
        for name, value in self.whole.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-10, msg=name)

    @property
    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def stepped(self, kind: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
        optimizer = kind([p for p in self.model.parameters() if p.dim() == 2])
        optimizer.step()
        return optimizer


def case_of(rank: int, roles: Roles, folder: Path, *, is_small: bool) -> Case:
    model = model_with_cut_root(is_small=is_small)
    sharded = fully_shard(model, roles, units=[Block])
    case = Case(rank, roles, folder, model, sharded, model_with_cut_root(is_small=is_small))
    case.backward()
    return case


# -- what works ---------------------------------------------------------------------------------


def clips(case: Case) -> None:
    """Against the whole model and, for the default norm, FSDP2; limits below and above the norm."""
    other = model_with_cut_root()
    mesh = init_device_mesh("cpu", (2,))
    for block in other.blocks:
        fsdp2(block, mesh=mesh)
    fsdp2(other, mesh=mesh)
    other.loss(tokens(0, 0, case.rank)).backward()
    theirs = nn.utils.clip_grad_norm_(other.parameters(), 1e9).full_tensor()  # type: ignore[attr-defined]
    for limit, order in ((1e9, 2.0), (0.3, 2.0), (0.2, 1.0), (0.01, float("inf")), (0.02, 3.0)):
        found = nn.utils.clip_grad_norm_(case.model.parameters(), limit, norm_type=order)
        expected = nn.utils.clip_grad_norm_(case.whole.parameters(), limit, norm_type=order)
        case.check_norm(found, expected)
        if limit == 1e9:
            torch.testing.assert_close(found, theirs, rtol=1e-10, atol=0)


def clips_by_foreach(case: Case) -> None:
    found = nn.utils.clip_grad_norm_(case.model.parameters(), 0.1, foreach=True)
    expected = nn.utils.clip_grad_norm_(case.whole.parameters(), 0.1)
    case.check_norm(found, expected)


def clips_its_own(case: Case) -> None:
    for limit in (1e9, 0.1):
        found = case.sharded.clip_grad_norm(limit)
        expected = nn.utils.clip_grad_norm_(case.whole.parameters(), limit)
        case.check_norm(found, expected)


def takes_norms(case: Case) -> None:
    expected = nn.utils.get_total_norm(
        [g for p in case.whole.parameters() if (g := p.grad) is not None]
    )
    for gradients in (case.gradients, [g.detach().float().double() for g in case.gradients]):
        found = nn.utils.get_total_norm(gradients)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    by_hand = torch.norm(torch.stack([torch.norm(g.detach(), 2) for g in case.gradients]), 2)
    torch.testing.assert_close(by_hand, expected, rtol=1e-10, atol=0)
    nn.utils.clip_grads_with_norm_(case.model.parameters(), 0.1, by_hand)
    nn.utils.clip_grads_with_norm_(case.whole.parameters(), 0.1, expected)
    case.check_gradients()


def clips_values(case: Case) -> None:
    nn.utils.clip_grad_value_(case.model.parameters(), 1e-3)
    nn.utils.clip_grad_value_(case.whole.parameters(), 1e-3)
    case.check_gradients()


def scales(case: Case) -> None:
    """An overflow in a part of rank 1 skips the step on both, and the scale is halved on both."""
    optimizer = torch.optim.SGD(case.sharded.parameters(), lr=0.1)
    expected = torch.optim.SGD(case.whole.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for spoilt in (True, False):
        optimizer.zero_grad()
        expected.zero_grad()
        case.backward(scaler.get_scale() if not spoilt else float(scaler.scale(torch.ones(()))))
        mine = [part for part in case.sharded.parameters() if part.numel()][-1]
        if spoilt and case.rank == 1:
            assert mine.grad is not None
            mine.grad.view(-1)[-1] = float("inf")
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        if not spoilt:
            case.check_gradients()
            expected.step()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 128.0
        case.check_parameters()


def optimizes(case: Case) -> None:
    for kind, options in (
        (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    ):
        mine = kind(case.model.parameters(), lr=0.01, **options)
        whole = kind(case.whole.parameters(), lr=0.01, **options)
        for optimizer in (mine, whole):
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            optimizer.step()
            schedule.step()
            optimizer.step()
        case.check_parameters()


def forgets(case: Case) -> None:
    case.model.zero_grad()
    assert not case.gradients
    case.whole.zero_grad()
    case.backward()
    case.check_gradients()


def averages(case: Case) -> None:
    """An average of parts is the part of the average."""
    average = get_ema_multi_avg_fn(0.5)
    parts = [part.detach().clone() for part in case.sharded.parameters()]
    wholes = [one.detach().clone() for one in case.whole.parameters()]
    for optimizer in (
        torch.optim.SGD(case.sharded.parameters(), lr=1.0),
        torch.optim.SGD(case.whole.parameters(), lr=1.0),
    ):
        optimizer.step()
    with torch.no_grad():
        for kept, now in ((parts, case.sharded.parameters()), (wholes, case.whole.parameters())):
            live: list[Tensor] = list(now)
            average(kept, [one.detach() for one in live], 1)
            torch._foreach_copy_(live, kept)
    case.sharded.parameters_changed()
    case.check_parameters()


def saves_whole(case: Case) -> None:
    state = case.sharded.full_state_dict()
    path = case.folder / f"whole{case.rank}.pt"
    torch.save(state, path)
    case.whole.load_state_dict(torch.load(path))
    case.check_parameters()
    changed = {name: value + 1 for name, value in state.items()}
    case.sharded.load_full_state_dict(changed)
    case.whole.load_state_dict(changed)
    case.check_parameters()
    case.sharded.zero_grad()
    case.whole.zero_grad()
    case.backward()
    case.check_gradients()


def keeps_parts(case: Case) -> None:
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=0.1)
    whole = torch.optim.AdamW(case.whole.parameters(), lr=0.1)
    optimizer.step()
    whole.step()
    with case.sharded.as_shards():
        kept = copy.deepcopy((case.model.state_dict(), optimizer.state_dict()))
    optimizer.step()
    with case.sharded.as_shards():
        case.model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
    optimizer.step()
    whole.step()
    case.check_parameters()


WORKS: dict[str, Callable[[Case], None]] = {
    "nn.utils.clip_grad_norm_(model.parameters(), x)": clips,
    "nn.utils.clip_grad_norm_(..., foreach=True)": clips_by_foreach,
    "sharded.clip_grad_norm(x)": clips_its_own,
    "nn.utils.get_total_norm(gradients)": takes_norms,
    "nn.utils.clip_grad_value_(model.parameters(), x)": clips_values,
    "torch.amp.GradScaler": scales,
    "elementwise optimizers of model.parameters()": optimizes,
    "model.zero_grad()": forgets,
    "get_ema_multi_avg_fn on sharded.parameters()": averages,
    "torch.save(sharded.full_state_dict(), path)": saves_whole,
    "state dicts within sharded.as_shards()": keeps_parts,
}


# -- what raises, and what the error tells to call --------------------------------------------


def replaces_data(case: Case) -> None:
    nn.utils.vector_to_parameters(torch.zeros(10**6).double(), case.model.parameters())
    case.model.loss(tokens(0, 0, 0))


def converts(case: Case) -> None:
    case.model.float()
    case.model.loss(tokens(0, 0, 0))


def whole_step(case: Case) -> None:
    theirs, mine = (torch.optim.AdamW(m.parameters()) for m in (case.whole, case.model))
    theirs.step()
    mine.load_state_dict(theirs.state_dict())
    mine.step()


def borrowed(case: Case) -> None:
    own = {name: p.detach() for name, p in case.model.named_parameters()}
    torch.func.functional_call(case.model, own, (tokens(0, 0, 0),))


def written(case: Case) -> Path:
    return case.folder / f"{case.rank}.pt"


Call = Callable[[Case], object]
STATE, LOAD, SAVE = "full_state_dict", "load_full_state_dict", "save_checkpoint"
VIEWS, PARTS, ONE_RANK = "optimizer_shard_views", "sharded.parameters()", "one rank"
ADAMW = torch.optim.AdamW
RAISES: dict[str, tuple[Call, str]] = {
    "model.state_dict()": (lambda c: c.model.state_dict(), STATE),
    "model.blocks[0].state_dict()": (lambda c: c.model.blocks[0].state_dict(), STATE),
    "nn.ModuleDict({'inner': model}).state_dict()": (
        lambda c: nn.ModuleDict({"inner": c.model}).state_dict(),
        STATE,
    ),
    "model.load_state_dict(state)": (lambda c: c.model.load_state_dict(c.whole.state_dict()), LOAD),
    "torch.save(model.state_dict(), path)": (
        lambda c: torch.save(c.model.state_dict(), written(c)),
        STATE,
    ),
    "torch.save(model, path)": (lambda c: torch.save(c.model, written(c)), STATE),
    "torch.save(list(model.parameters()), path)": (
        lambda c: torch.save(list(c.model.parameters()), written(c)),
        STATE,
    ),
    "pickle.dumps(model.blocks[0])": (lambda c: pickle.dumps(c.model.blocks[0]), STATE),
    "dcp.save({'model': model})": (
        lambda c: dcp.save({"model": c.model}, checkpoint_id=c.folder / "dcp"),
        SAVE,
    ),
    "dcp.load(model.state_dict())": (
        lambda c: dcp.load(c.model.state_dict(), checkpoint_id=c.folder / "dcp"),
        SAVE,
    ),
    "get_model_state_dict(model)": (lambda c: dcp_state.get_model_state_dict(c.model), STATE),
    "get_model_state_dict(model, options=full)": (
        lambda c: dcp_state.get_model_state_dict(c.model, options=FULL),
        STATE,
    ),
    "set_model_state_dict(model, state)": (
        lambda c: dcp_state.set_model_state_dict(c.model, c.whole.state_dict(), options=FULL),
        LOAD,
    ),
    "get_optimizer_state_dict(model, optimizer)": (
        lambda c: dcp_state.get_optimizer_state_dict(c.model, c.stepped(ADAMW)),
        VIEWS,
    ),
    "optimizer.state_dict()": (lambda c: c.stepped(ADAMW).state_dict(), VIEWS),
    "optimizer.load_state_dict(state)": (lambda c: c.stepped(ADAMW).load_state_dict({}), VIEWS),
    "optimizer.load_state_dict(unsharded) before its first step": (whole_step, VIEWS),
    "copy.deepcopy(model)": (lambda c: copy.deepcopy(c.model), PARTS),
    "copy.deepcopy(model.blocks)": (lambda c: copy.deepcopy(c.model.blocks), PARTS),
    "AveragedModel(model)": (lambda c: AveragedModel(c.model), PARTS),
    "nn.utils.parameters_to_vector(model.parameters())": (
        lambda c: nn.utils.parameters_to_vector(c.model.parameters()),
        STATE,
    ),
    "nn.utils.vector_to_parameters(vector, model.parameters())": (replaces_data, "copy_"),
    "model.float(), model.half(), model.to(dtype)": (converts, "convert before sharding"),
    "DistributedDataParallel(model)": (
        lambda c: nn.parallel.DistributedDataParallel(c.model),
        "Roles(replicate=...)",
    ),
    "torch.func.functional_call(model, ...)": (borrowed, "torch.no_grad()"),
    "torch.optim.Adafactor": (lambda c: c.stepped(torch.optim.Adafactor), ONE_RANK),
    "torch.optim.Muon": (lambda c: c.stepped(torch.optim.Muon), ONE_RANK),
    "torch.optim.LBFGS": (
        lambda c: torch.optim.LBFGS(c.model.parameters()).step(lambda: torch.zeros(())),
        ONE_RANK,
    ),
    "gradient.norm() by itself": (lambda c: [float(g.norm()) for g in c.gradients], "grad_norm()"),
    "gradient.sum(), gradient @ x": (
        lambda c: [g.sum() for g in c.gradients],
        "as_subclass(torch.Tensor)",
    ),
    "torch.cat([g.flatten() for g in gradients])": (
        lambda c: torch.cat([g.flatten() for g in c.gradients]),
        "full_gradients()",
    ),
}


def run_rows(
    rank: int,
    folder: Path,
    row: Callable[[Case, str], None],
    names: Sequence[str],
    *,
    is_small: bool = False,
) -> None:
    """Each row on a model of its own, with groups that all of them share."""
    wrong = {}
    with open_two() as groups:
        roles = roles_of(groups)
        for name in names:
            try:
                row(case_of(rank, roles, folder, is_small=is_small), name)
            except (Exception, pytest.fail.Exception) as error:
                wrong[name] = f"{type(error).__name__}: {error}"
    assert not wrong, "\n".join(f"{name}: {found}" for name, found in wrong.items())


def _raises(case: Case, name: str) -> None:
    call, use = RAISES[name]
    before = case.sharded.full_state_dict()
    with pytest.raises(PcommError) as told:
        call(case)
    assert use in f"{told.value.why} {told.value.fix}"
    if not name.startswith(("nn.utils.vector", "model.float")):
        for key, value in case.sharded.full_state_dict().items():
            is_changed = "optimizer" in name
            assert is_changed or torch.equal(value, before[key]), f"{key} has changed"


@ranks(2)
def test_what_works(rank: int, tmp_path: Path) -> None:
    run_rows(rank, tmp_path, lambda case, name: WORKS[name](case), list(WORKS))


@ranks(2)
def test_what_raises(rank: int, tmp_path: Path) -> None:
    run_rows(rank, tmp_path, _raises, list(RAISES), is_small=True)


@ranks(2)
def test_matrices_that_one_rank_holds(rank: int) -> None:
    """Optimizers for whole matrices are right where no rank has only some rows."""
    kinds: list[Callable[..., torch.optim.Optimizer]] = [torch.optim.Muon, torch.optim.Adafactor]
    with open_two() as groups:
        roles = roles_of(groups)
        for kind in kinds:
            torch.manual_seed(0)
            whole = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
            model = copy.deepcopy(whole)
            # Two matrices a unit, and one of them on each rank.
            layers = list(model)
            units = [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]
            model = nn.Sequential(*units)
            sharded = fully_shard(model, roles, units=units)
            x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
            with pytest.raises(PcommError, match=r"if p\.numel\(\)"):
                kind(sharded.parameters(), lr=0.1).step()
            own = [part for part in sharded.parameters() if part.numel()]
            assert len(own) == 2
            optimizers = kind(own, lr=0.1), kind(whole.parameters(), lr=0.1)
            for _ in range(2):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                model(x[rank]).square().mean().backward()
                whole(x.flatten(0, 1)).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
            found = sharded.full_state_dict().values()
            for mine, expected in zip(found, whole.parameters(), strict=True):
                torch.testing.assert_close(mine, expected.detach(), rtol=1e-3, atol=1e-4)
