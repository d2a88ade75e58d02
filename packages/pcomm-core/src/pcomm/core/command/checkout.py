"""Where a distribution is installed from."""

from __future__ import annotations

__all__ = ["what_to_install"]

# What pcomm-integration stands on.
_BELOW = ("pcomm-core", "pcomm-gdn-cp", "pcomm-fsdp", "pcomm-ntp", "pcomm-inference")


def what_to_install(distribution: str, extra: str = "") -> str:
    """The words for pip that bring a distribution: folders of a checkout for those of pcomm.

    They are on no package index, where a stranger could register such a name. So are those that it
    needs, which therefore come with it.

    Args:
        distribution: Its name, such as `pcomm-fsdp` or `numpy`.
        extra: An extra of it, such as `serve`.
    """
    if not distribution.startswith("pcomm-"):
        return distribution
    is_whole = distribution == "pcomm-integration"
    own = "./integration" if is_whole else f"./packages/{distribution}"
    needed = _BELOW if is_whole else ("pcomm-core",)
    words = [f"./packages/{name}" for name in needed if name != distribution]
    return " ".join([*words, f"'{own}[{extra}]'" if extra else own])
