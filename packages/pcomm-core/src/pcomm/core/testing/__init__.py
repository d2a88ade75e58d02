"""Tests on several ranks, comparisons with derived bounds, rate-limited networks; in the wheel."""

from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.core.testing.close import assert_as_accurate, assert_close, assert_equal
    from pcomm.core.testing.living import Living, left_behind
    from pcomm.core.testing.namespaces import rated_network
    from pcomm.core.testing.on_ranks import RankPool, ranks
    from pcomm.core.testing.poison import poisoned_memory
    from pcomm.core.testing.virtual import run_virtual

__all__ = [
    "Living",
    "RankPool",
    "assert_as_accurate",
    "assert_close",
    "assert_equal",
    "left_behind",
    "poisoned_memory",
    "ranks",
    "rated_network",
    "run_virtual",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "Living": "living",
        "RankPool": "on_ranks",
        "assert_as_accurate": "close",
        "assert_close": "close",
        "assert_equal": "close",
        "left_behind": "living",
        "poisoned_memory": "poison",
        "ranks": "on_ranks",
        "rated_network": "namespaces",
        "run_virtual": "virtual",
    },
)
