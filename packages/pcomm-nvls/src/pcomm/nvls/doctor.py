"""The check of `pcomm doctor`: what a group of this host could use, without asking any group."""

from __future__ import annotations

from collections.abc import Iterable

from pcomm.core.doctor.report import CudaFacts, Finding, MachineProbe, TorchFacts
from pcomm.nvls._capability import DIST, MULTICAST, RankFacts

__all__ = ["check_nvls"]

_NAME = "nvls"
_NOT_ASKED = "No group was asked: a workspace tries it, and explains what it got."
# https://github.com/pytorch/pytorch/issues/195596
_WITHOUT_MULTICAST = (
    "If one hangs as it opens, a GPU was refused its multicast address, which torch does not tell "
    "the other ranks: TORCH_SYMM_MEM_DISABLE_MULTICAST=1 does without."
)


def check_nvls(probe: MachineProbe) -> Iterable[Finding]:
    """What the ranks of a group on this host could use, from the facts that the doctor has."""
    cuda = probe.cuda()
    try:
        torch = probe.torch()
    except (ImportError, OSError, RuntimeError):
        yield Finding(_NAME, "info", "not measured", "torch cannot be imported.")
        return
    version, error = _triton(probe)
    is_emulated = probe.environment().get("TRITON_INTERPRET") == "1"
    if cuda is None or not cuda.devices or torch.cuda is None:
        facts = RankFacts(False, version, "", error, is_emulated)
        level, reason = facts.level()
        if level == DIST:
            yield Finding(_NAME, "missing", "torch.distributed alone: no CUDA device", reason)
        else:
            why = "Correct, and slow: for tests. Unset TRITON_INTERPRET to leave it."
            yield Finding(_NAME, "info", "kernels are emulated on the CPU", why)
        return
    ranks = [_facts(cuda, torch, i, version, error, is_emulated) for i in range(len(cuda.devices))]
    levels = [facts.level() for facts in ranks]
    architectures = {facts.architecture for facts in ranks}
    least = min(level for level, _ in levels)
    lacking = [f"device {i}: {reason}" for i, (level, reason) in enumerate(levels) if reason]
    closed = [f"device {i} reaches no {', '.join(facts.unreachable)}"
              for i, facts in enumerate(ranks) if facts.unreachable]  # fmt: skip
    if least == DIST:
        yield Finding(_NAME, "missing", "torch.distributed alone", "\n".join(lacking))
    elif len(architectures) > 1:
        value = f"groups within one of {', '.join(sorted(architectures))}"
        yield Finding(_NAME, "info", value, "Ranks of one group have one architecture.")
    elif closed:
        value = "groups of devices that reach each other"
        yield Finding(_NAME, "info", value, "\n".join(closed))
    elif len(ranks) == 1:
        yield Finding(_NAME, "info", f"{ranks[0].architecture}, one device", _NOT_ASKED)
    elif least == MULTICAST:
        value = f"multicast between {len(ranks)} devices of {ranks[0].architecture}"
        yield Finding(_NAME, "ok", value, f"{_NOT_ASKED}\n{_WITHOUT_MULTICAST}")
    else:
        value = f"access to peers between {len(ranks)} devices of {ranks[0].architecture}"
        yield Finding(_NAME, "info", value, "\n".join([*lacking, _NOT_ASKED]))


def _facts(
    cuda: CudaFacts, torch: TorchFacts, number: int, version: str, error: str, is_emulated: bool
) -> RankFacts:
    device = cuda.devices[number]
    others = [other for other in range(len(cuda.devices)) if other != number]
    return RankFacts(
        is_cuda=True,
        triton=version,
        domain="",
        triton_error=error,
        is_emulated=is_emulated,
        compute_capability=device.capability,
        symmetric_memory_error=torch.symmetric_memory_error,
        has_multicast=device.has_multicast,
        unreachable=tuple(f"device {other}" for other in others if other not in device.peers),
    )


def _triton(probe: MachineProbe) -> tuple[str, str]:
    try:
        return probe.module_version("triton"), ""
    except ImportError as error:
        return "", f"{type(error).__name__}: {error}"
