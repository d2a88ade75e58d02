"""The same numbers on both sides of every size at which a gloo group does something else.

From 256 KiB a shard on, ranks exchange in pairs; what is added comes in chunks of 128 KiB, of which
there are at most eight, so that chunks grow from 1 MiB on.
"""

from __future__ import annotations

from itertools import chain

import torch

from pcomm.core.groups.open_groups import open_groups
from pcomm.core.testing.assertions import assert_equal
from pcomm.core.testing.on_ranks import ranks
from pcomm.core.topology import Topology

KIB = 1024 // 4
BORDERS = (256 * KIB, 3 * 128 * KIB, 8 * 128 * KIB)
SIZES = (*chain.from_iterable((n - 1, n, n + 1) for n in BORDERS), 3 * 1024 * KIB)


@ranks(2)
def test_values_do_not_depend_on_the_size(rank: int) -> None:
    with open_groups(Topology({"dp": 2}), ["dp"]) as groups:
        collectives = groups["dp"].collectives
        for n in SIZES:
            # Sums of small integers are exact, and no two neighbours are equal.
            both = [(torch.arange(2 * n) * (7 + r) % 1021).float() for r in range(2)]
            pending = collectives.reduce_scatter_async(both[rank])
            gathered = collectives.all_gather(both[rank][:n])
            assert_equal(gathered, torch.cat([x[:n] for x in both]))
            assert_equal(pending.wait(), (both[0] + both[1])[rank * n : (rank + 1) * n])
