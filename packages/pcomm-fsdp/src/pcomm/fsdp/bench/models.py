"""Trained models, their batches, and the gradients they must get."""

# N ranks, R rows, D width, S sequences, T tokens, H heads, E width of a head

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pcomm.core.collectives.protocol import Collectives
from pcomm.core.testing.close import assert_as_accurate
from pcomm.fsdp.bench.settings import Widths

__all__ = ["Block", "Layer", "Problem", "Reference", "squared_norm"]

_NUM_TOKENS, _NUM_HEADS = 32, 4
# The largest loss of precision against plain torch that a check lets pass; sums over ranks and
# over rows are added in another order, and an error in communication is larger by magnitudes.
_FACTOR = 4.0


class Layer(nn.Module):
    """A matrix and a ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x_RD: Tensor) -> Tensor:
        """The next layer's input."""
        y_RD: Tensor = F.relu(self.linear(x_RD))
        return y_RD


class Block(nn.Module):
    """A block of a transformer: causal attention and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_RD: Tensor) -> Tensor:
        """The next block's input."""
        rows, width = x_RD.shape
        num_tokens = min(_NUM_TOKENS, rows)
        qkv = self.qkv(self.norm_1(x_RD)).view(-1, num_tokens, 3, _NUM_HEADS, width // _NUM_HEADS)
        q_SHTE, k_SHTE, v_SHTE = qkv.permute(2, 0, 3, 1, 4)
        mixed_SHTE = F.scaled_dot_product_attention(q_SHTE, k_SHTE, v_SHTE, is_causal=True)
        x_RD = x_RD + self.output(mixed_SHTE.transpose(1, 2).reshape(rows, width))
        y_RD: Tensor = x_RD + self.down(F.gelu(self.up(self.norm_2(x_RD))))
        return y_RD


@dataclass(frozen=True)
class Problem:
    """A model, a batch for each rank, and a loss; the same numbers in every process.

    Args:
        name: One of `settings.MODELS`.
        widths: Sizes.
    """

    name: str
    widths: Widths

    @property
    def unit(self) -> type[Layer] | type[Block]:
        """The class of the modules that are sharded one by one."""
        return Layer if self.name == "linear" else Block

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Sequential:
        """A new model."""
        model = nn.Sequential(*(self.unit(self.widths.width) for _ in range(self.depth)))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    # So that what goes through many layers neither grows nor vanishes.
                    std = (2 / parameter.shape[1]) ** 0.5
                    parameter.normal_(std=std, generator=generator)
            for module in model.modules():
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()
        return model.to(dtype)

    @property
    def depth(self) -> int:
        """Number of units."""
        return self.widths.depth

    def batch(self, rank: int, *, rows: int | None = None) -> Tensor:
        """The rows of a rank, `[R, D]`; those of every rank differ."""
        generator = torch.Generator().manual_seed(1 + rank)
        return torch.randn(rows or self.widths.rows, self.widths.width, generator=generator)

    def loss(self, model: nn.Module, batch_RD: Tensor) -> Tensor:
        """A number; the mean over ranks is that over all rows."""
        loss: Tensor = model(batch_RD).square().mean()
        return loss

    def unit_bytes(self) -> list[int]:
        """Bytes of each unit's parameters."""
        model = self.build()
        return [sum(p.nbytes for p in unit.parameters()) for unit in model]

    def gradients(self, control: Collectives, dtype: torch.dtype) -> dict[str, Tensor]:
        """Gradients of autograd for all rows: the mean over ranks, by the parameter's name.

        Collective; each rank computes its own rows, with a whole model.
        """
        model = self.build(dtype)
        self.loss(model, self.batch(control.rank).to(dtype)).backward()
        found = {}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            found[name] = control.all_reduce(parameter.grad).div_(control.size)
        return found


@dataclass(frozen=True)
class Reference:
    """Gradients that a training must have.

    Args:
        plain: Gradients of plain torch in fp32.
        exact: Gradients of plain torch in fp64.
        num_ranks: Ranks over which they are the mean.
    """

    plain: dict[str, Tensor]
    exact: dict[str, Tensor]
    num_ranks: int

    @classmethod
    def of(cls, problem: Problem, control: Collectives) -> Reference:
        """Those of a problem. Collective."""
        plain, exact = (problem.gradients(control, d) for d in (torch.float32, torch.float64))
        return cls(plain, exact, control.size)

    def check(self, found: dict[str, Tensor]) -> None:
        """Compare.

        Raises:
            AssertionError: They are not about as close to fp64 as plain torch's are in fp32.
        """
        assert found.keys() == self.exact.keys(), f"{sorted(found)} and {sorted(self.exact)}"
        for name, value in found.items():
            try:
                assert_as_accurate(
                    value,
                    self.plain[name],
                    self.exact[name],
                    factor=_FACTOR,
                    num_terms=self.num_ranks,
                )
            except AssertionError as problem:
                raise AssertionError(f"gradient of {name}: {problem}") from problem


def squared_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all numbers, in fp64."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        total += gradient.as_subclass(Tensor).double().square().sum()
    return total
