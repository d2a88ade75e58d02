"""The settings of a measurement: ranks, links, models, forms and rounds. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from pcomm.core.errors import ConfigError
from pcomm.fsdp.bench.forms import FORMS, Form

__all__ = ["MODELS", "Link", "Settings", "Widths", "place_of"]

MODELS = ("linear", "transformer")


@dataclass(frozen=True)
class Widths:
    """Sizes of a model.

    Args:
        width: Width of hidden states.
        depth: Layers, each of which is a unit.
        rows: Rows of the batch of each rank; the transformer makes sequences of 32 of them.
    """

    width: int
    depth: int
    rows: int


@dataclass(frozen=True)
class Link:
    """The rates of each rank's links, and the size of its computation.

    Args:
        mbit_per_s: Rate of a link, each way, in 10^6 bits a second.
        batch: Batch of each rank, in multiples of the model's usual rows. Bytes do not depend on
            it, so it sets how long a step computes for each byte.
    """

    mbit_per_s: float = 400.0
    batch: int = 1

    @property
    def bytes_per_s(self) -> float:
        """The rate of a link each way, headers included."""
        return self.mbit_per_s * 1e6 / 8

    @property
    def name(self) -> str:
        """As it stands in rows; empty for the first one that was ever measured."""
        if self == Link():
            return ""
        giga, mega = f"{self.mbit_per_s / 1000:g} Gbit/s", f"{self.mbit_per_s:g} Mbit/s"
        return f"{giga if self.mbit_per_s >= 1000 else mega}, batch x{self.batch}"


@dataclass(frozen=True)
class Settings:
    """A run of the benchmark.

    Args:
        ranks: Data-parallel sizes, one after another.
        models: Names of what is trained.
        links: Rates, one after another. Of the usual two, communication takes far longer than
            computation on the first, and computation takes longer on the second.
        forms: Keys of the forms that are compared.
        rounds: Number of turns of each case.
        alone_rounds: The same on one rank, where a turn is short.
        is_small: Tiny models, which take no time and show nothing.

    Raises:
        ConfigError: Numbers or names that cannot be measured.
    """

    ranks: tuple[int, ...] = (2, 4)
    models: tuple[str, ...] = MODELS
    links: tuple[Link, ...] = (Link(), Link(2000.0, 4))
    forms: tuple[str, ...] = tuple(form.key for form in FORMS)
    rounds: int = 5
    alone_rounds: int = 41
    is_small: bool = False

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 2 or max(self.ranks) > 16:
            raise ConfigError(
                f"pcomm bench fsdp --ranks {','.join(map(str, self.ranks))}",
                found="a number of ranks below 2 or above 16",
                why="One rank sends nothing, and is measured in every run; the ranks share the "
                "cores of this machine.",
                fix="Use numbers such as 2,4.",
            )
        _check_known("--models", self.models, MODELS)
        _check_known("--forms", self.forms, tuple(form.key for form in FORMS))
        if self.rounds < 3 or self.alone_rounds < 3:
            raise ConfigError(
                f"pcomm bench fsdp --rounds {min(self.rounds, self.alone_rounds)}",
                found="fewer than 3 rounds",
                why="The median of so few is a matter of luck.",
                fix="Use 5.",
            )
        for link in self.links:
            if not 1 <= link.mbit_per_s <= 100_000 or not 1 <= link.batch <= 64:
                raise ConfigError(
                    f"pcomm bench fsdp --links {link.mbit_per_s:g}x{link.batch}",
                    found="a rate or a batch out of range",
                    why="A link below 1 Mbit/s takes for ever, and one above 100 Gbit/s is no "
                    "limit here; a batch is 1 to 64 times the usual one.",
                    fix="Use 400,2000x4.",
                )
        if not self.links or len(set(self.links)) < len(self.links):
            raise ConfigError(
                "pcomm bench fsdp --links",
                found="no link, or one of them twice",
                why="Rows are told apart by rate and batch.",
                fix="Use 400,2000x4.",
            )

    def chosen_forms(self) -> list[Form]:
        """The forms that are compared, in the order of tables."""
        return [form for form in FORMS if form.key in self.forms]

    def widths(self, model: str, link: Link | None = None) -> Widths:
        """Sizes of a model: 18 and 9 MiB of parameters, unless small ones were asked for."""
        batch = 1 if link is None else link.batch
        if self.is_small:
            # Shards of the linear one are large enough, on up to 4 ranks, to go between pairs.
            return {"linear": Widths(512, 3, 32 * batch), "transformer": Widths(64, 3, 32 * batch)}[
                model
            ]
        return {
            "linear": Widths(768, 8, 192 * batch),
            "transformer": Widths(224, 4, 128 * batch),
        }[model]


def place_of(num_ranks: int, model: str, link: Link) -> str:
    """The place of a measurement, as it stands in rows."""
    ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
    return ", ".join(filter(None, (ranks, model, link.name)))


def _check_known(option: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(
            f"pcomm bench fsdp {option} {','.join(names)}",
            found=f"unknown: {', '.join(unknown) or 'no name at all'}",
            why="Names are those of this benchmark.",
            fix=f"Use some of {','.join(known)}.",
        )
