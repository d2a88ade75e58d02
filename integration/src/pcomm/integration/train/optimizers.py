"""The optimizers of a run: AdamW for everything, or Muon for the matrices of blocks beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from pcomm.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from pcomm.integration.config.sections import TrainConfig
from pcomm.integration.models.attention import Attention
from pcomm.integration.models.gated_delta_net import GatedDeltaNet
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.models.layers import SwiGLU
from pcomm.integration.models.mamba2 import Mamba2

__all__ = ["MuonAndAdamW", "ParameterKinds", "make_optimizer", "set_rates"]


class ParameterKinds(NamedTuple):
    """What an optimizer treats in which way, by the names of the parameters.

    To be asked of a model before its parameters become shards, which may lose their dimensions.
    """

    decaying: frozenset[str]
    """Parameters that decay: matrices, and not norms or what there is one of for each head."""

    matrices: Mapping[str, Sequence[int]]
    """Weights of the linear layers in blocks, which are Muon's, each with the rows of its matrices:
    one, or several where one product makes queries, keys and values, or gate and up."""

    @classmethod
    def of(cls, model: LanguageModel) -> ParameterKinds:
        """The kinds of the parameters of a model. Local."""
        decaying = frozenset(name for name, p in model.named_parameters() if p.dim() >= 2)
        matrices: dict[str, Sequence[int]] = {}
        # A module comes before the layers in it.
        for path, module in model.blocks.named_modules(prefix="blocks"):
            if isinstance(module, Attention):
                matrices[f"{path}.qkv.weight"] = module.sizes
            elif isinstance(module, GatedDeltaNet | Mamba2):
                matrices[f"{path}.input.weight"] = module.sizes
            elif isinstance(module, SwiGLU):
                matrices[f"{path}.gate_up.weight"] = [len(module.gate_up.weight) // 2] * 2
            elif isinstance(module, ColumnParallelLinear | RowParallelLinear):
                matrices.setdefault(f"{path}.weight", [len(module.weight)])
        return cls(decaying, matrices)


def make_optimizer(
    named: Iterable[tuple[str, nn.Parameter]], kinds: ParameterKinds, train: TrainConfig
) -> Optimizer:
    """The optimizer of a run, which `train.optimizer` names. Local.

    Args:
        named: Parameters, or shards of them, by name; whole ones for Muon.
        kinds: Kinds of these parameters, by which weights decay or Muon applies.
        train: Learning rates, decay, momentum and decay rates of the averages.
    """
    parameters = dict(named)
    is_muons: Callable[[str], bool] = lambda name: (  # noqa: E731
        train.optimizer == "muon" and name in kinds.matrices
    )
    rest = {name: parameter for name, parameter in parameters.items() if not is_muons(name)}
    adamw = AdamW(
        [
            {
                "params": [p for name, p in rest.items() if name in kinds.decaying],
                "weight_decay": train.weight_decay,
            },
            {
                "params": [p for name, p in rest.items() if name not in kinds.decaying],
                "weight_decay": 0.0,
            },
        ],
        lr=train.learning_rate,
        betas=train.betas,
        fused=True,
    )
    if train.optimizer == "adamw":
        return adamw
    muons = {p: kinds.matrices[name] for name, p in parameters.items() if is_muons(name)}
    return MuonAndAdamW(muons, adamw, train)


def set_rates(optimizer: Optimizer, rate: float, muon_rate: float) -> None:
    """Give an optimizer of `make_optimizer` its learning rates of a step. Local."""
    for group in optimizer.param_groups:
        group["lr"] = muon_rate if "momentum" in group else rate


class MuonAndAdamW(Optimizer):
    """torch's Muon for some matrices and its AdamW for all other parameters, as one optimizer.

    The first group is Muon's. A weight of several matrices has one momentum, and each matrix is
    made orthogonal by itself, so that their number in a weight changes nothing.

    Args:
        matrices: Weights for Muon, each with the rows of its matrices.
        adamw: The optimizer of the others.
        train: Muon's learning rate and momentum, and the decay.
    """

    def __init__(
        self, matrices: Mapping[nn.Parameter, Sequence[int]], adamw: AdamW, train: TrainConfig
    ) -> None:
        # They share the memory of the weight.
        self._parts = {
            whole: [nn.Parameter(part) for part in whole.detach().split(list(rows))]
            for whole, rows in matrices.items()
        }
        self._adamw, self._muon = (
            adamw,
            Muon(
                [part for parts in self._parts.values() for part in parts],
                lr=train.muon_learning_rate,
                weight_decay=train.weight_decay,
                momentum=train.muon_momentum,
            ),
        )
        (group,) = self._muon.param_groups
        super().__init__([{**group, "params": list(matrices)}, *adamw.param_groups], {})
        adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Change all parameters by their gradients. Local."""
        assert closure is None, "a step of the trainer has computed the gradients"
        self._muon.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        for whole, parts in self._parts.items():
            assert whole.grad is not None, "every layer takes part in a step"
            if "momentum_buffer" not in self.state[whole]:
                self.state[whole]["momentum_buffer"] = torch.zeros_like(whole)
            momentum = self.state[whole]["momentum_buffer"]
            rows = [len(part) for part in parts]
            gradients = whole.grad.as_subclass(Tensor).split(rows)
            for part, gradient, own in zip(parts, gradients, momentum.split(rows), strict=True):
                part.grad = gradient
                self._muon.state[part]["momentum_buffer"] = own
        self._muon.step()
        # The gradient of the whole would not go while a part of it is held.
        self._muon.zero_grad()
        self._adamw.step()
