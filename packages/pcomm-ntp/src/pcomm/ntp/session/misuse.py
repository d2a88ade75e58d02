"""Errors of calls that a session cannot answer."""

from __future__ import annotations

from pcomm.core.errors import (
    ClosedError,
    ConfigError,
    DivergenceError,
    TopologyError,
    UnsupportedError,
)

__all__ = [
    "applied_by_hand",
    "backend",
    "cannot_go_on",
    "changed_after_finish",
    "closed",
    "drifted",
    "ended",
    "given",
    "not_moved",
    "over",
    "speed",
    "unlike",
    "without",
]


def given(rank: int | None) -> int:
    """The rank, if it was given."""
    if rank is None:
        raise ConfigError(
            "Session: rank",
            found="a function that connects to the store, and no rank",
            why="The function does not tell which rank this process is.",
            fix="Give rank=, or a RankPlace.",
        )
    return rank


def speed(rank: int, found: float) -> ConfigError:
    """The error of a speed that no rank of the job can have."""
    return ConfigError(
        f"Session.set_speed: rank {rank}, speed {found}",
        found="a rank that the job does not have, or a speed that is not above 0 and at most 1",
        why="Units are dealt out in proportion to speeds, relative to the fastest rank.",
        fix="Give a global rank, and the time of the fastest rank over that of this one.",
    )


def over(asked: str, number: int) -> ConfigError:
    """The error of a call on an attempt whose step is applied."""
    return ConfigError(
        f"{asked} in the attempt at step {number}",
        found="a step that is applied already",
        why="Each step is applied once; the next one has an attempt of its own.",
        fix="Call it before commit(), and commit() once.",
    )


def closed(asked: str) -> ClosedError:
    """The error of a call on a session that was closed."""
    return ClosedError(
        asked,
        found="a session that was closed",
        why="Its groups are gone.",
        fix="Make another session.",
    )


def without(name: str) -> ClosedError:
    """The error of a session that has no such thing now."""
    return ClosedError(
        f"Session: {name}",
        found=f"no {name}",
        why="A rank without units has no model, and a session that ended has no groups.",
        fix="Ask within an attempt; `is_idle` tells whether the rank has units.",
    )


def backend(found: str) -> None:
    """Refuse a backend whose operations a failure cannot end."""
    if found != "gloo":
        raise UnsupportedError(
            f"Session: backend={found!r}",
            found="a backend other than gloo",
            why="When a rank dies the others leave their operations. Those of NCCL end by an abort "
            "alone, which is not there yet; the ranks would wait, and torch would end them.",
            fix='Use backend="gloo", with tensors between ranks on the CPU.',
        )


def ended(other: str, step: int) -> ConfigError:
    """The error of a rank that attempts a step which `other`, in words, does not."""
    return ConfigError(
        f"Session.attempts: the attempt at step {step}",
        found=other,
        why="All ranks take part in each step, and that one waits for the others to end.",
        fix="Give the same `until` on all ranks, and call request_stop() to end earlier.",
    )


def applied_by_hand() -> ConfigError:
    """The error of parameters that the program has changed in a step."""
    return ConfigError(
        "Attempt.commit",
        found="parameters that were changed since the first backward(), as by optimizer.step()",
        why="commit() calls optimizer.step() once all ranks are ready, so the step would be "
        "applied twice.",
        fix="Leave optimizer.step() and scaler.step() out. A Session takes no GradScaler: train "
        "in bf16 or fp32.",
    )


def changed_after_finish() -> ConfigError:
    """The error of gradients that the program has changed when they were summed."""
    return ConfigError(
        "Attempt.commit",
        found="gradients that were changed since finish(), as by torch's clip_grad_norm_",
        why="A norm that a rank takes of its own shards differs between ranks, and so would "
        "what they apply.",
        fix="Give max_norm to finish() or commit(). What is done to each element by itself, such "
        "as clipping by value, goes into optimizer.register_step_pre_hook. A Session takes no "
        "GradScaler: train in bf16 or fp32.",
    )


def unlike(found: str) -> DivergenceError:
    """The error of ranks that begin with other numbers."""
    return DivergenceError(
        "Session: the state at the start",
        found=found,
        why="Replicas begin with equal numbers, and what has no units is the same on all ranks and "
        "moves as a whole; so it cannot be a copy of a shard.",
        fix="Seed alike on all ranks, and cut the initial values of whole tensors. Give units to a "
        "buffer that is cut like a parameter, or register it with persistent=False.",
    )


def not_moved(found: str) -> DivergenceError:
    """The error of a state that did not arrive as it was, or had drifted apart before."""
    return DivergenceError(
        "Session: the state after a change of ranks",
        found=found,
        why="The state has moved, and all ranks that hold a range of units should hold the same "
        "numbers. They were moved wrongly, or replicas had drifted apart before.",
        fix="Use an elementwise optimizer, such as AdamW or SGD, and settings that are the same on "
        "all ranks; else start from the last checkpoint, and report this.",
    )


def drifted(found: str, optimizer: object) -> DivergenceError:
    """The error of replicas of different degrees that do not stay equal."""
    return DivergenceError(
        f"Session: replicas of different degrees, trained by {type(optimizer).__name__}",
        found=found,
        why="Their shards are cut at different places. An optimizer that takes norms or products "
        "of a shard, or draws at random, changes the same element differently on each.",
        fix="Use an elementwise optimizer, such as AdamW or SGD, with the same settings on all "
        "ranks, and go on from a checkpoint of before.",
    )


def cannot_go_on(error: TopologyError, applied: int, *, is_saved: bool) -> TopologyError:
    """The error of `plan` for the ranks that are left, and what is left of the training."""
    left = (
        f"at_end was called with the state after {applied} steps."
        if is_saved
        else "its last checkpoint is what is left, and at_end was not called."
    )
    return TopologyError(
        error.asked, found=error.found, why=error.why, fix=f"Start the job again: {left}"
    )
