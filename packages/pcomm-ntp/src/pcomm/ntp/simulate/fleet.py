"""The GPUs of a simulated job: scale-up domains of one tensor-parallel group each, in replicas."""

from __future__ import annotations

from dataclasses import dataclass

from pcomm.core.errors import ConfigError

__all__ = ["Fleet", "positive"]


@dataclass(frozen=True)
class Fleet:
    """GPUs of one job, numbered so that those of a domain, and of a replica, are neighbours.

    Args:
        num_gpus: Number of GPUs; a multiple of `tp * domains_per_replica`.
        tp: Tensor-parallel degree without failures, which is the number of GPUs of a domain.
        domains_per_replica: Number of domains that train one replica together, such as its
            pipeline stages.

    Raises:
        ConfigError: A size is below 1, or the replicas do not fill the GPUs.
    """

    num_gpus: int
    tp: int
    domains_per_replica: int = 1

    def __post_init__(self) -> None:
        for name in ("num_gpus", "tp", "domains_per_replica"):
            positive(f"Fleet: {name}", getattr(self, name))
        replica = self.tp * self.domains_per_replica
        if self.num_gpus % replica:
            below = self.num_gpus - self.num_gpus % replica
            fitting = [size for size in (below, below + replica) if size]
            raise ConfigError(
                f"Fleet: num_gpus={self.num_gpus}",
                found=f"a replica has {self.tp} x {self.domains_per_replica} = {replica} GPUs",
                why=f"{self.num_gpus % replica} GPUs would be in no replica and count as lost.",
                fix=f"Use num_gpus={' or '.join(map(str, fitting))}.",
            )

    @property
    def num_domains(self) -> int:
        """Number of domains of the job."""
        return self.num_gpus // self.tp

    @property
    def num_replicas(self) -> int:
        """Number of replicas of the job."""
        return self.num_domains // self.domains_per_replica

    def __str__(self) -> str:
        return f"{self.num_gpus} GPUs, TP{self.tp} x{self.domains_per_replica}"


def positive(asked: str, found: int) -> None:
    """Raise a `ConfigError` for a count below 1."""
    if found < 1:
        raise ConfigError(
            asked, found=f"{found}", why="It is a count of things that exist.", fix="Use 1 or more."
        )
