"""Where a distribution is installed from."""

from __future__ import annotations

__all__ = ["what_to_install"]


def what_to_install(distribution: str) -> str:
    """The word for pip that brings a distribution: a folder of a checkout for those of pcomm.

    They are on no package index, where a stranger could register such a name.

    Args:
        distribution: Its name, such as `pcomm-fsdp` or `numpy`.
    """
    if distribution == "pcomm-integration":
        return "./integration"
    return f"./packages/{distribution}" if distribution.startswith("pcomm-") else distribution
