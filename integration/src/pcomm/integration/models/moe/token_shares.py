"""Tokens that every tensor-parallel rank holds, split so that each is routed once.

The experts' view of the ranks has no tensor-parallel axis: an expert lies whole on one rank. So
where the residual stream is replicated, each rank takes a shard of the tokens, and the results
are gathered. Under sequence parallelism the stream is split like that already.
"""

# Shape suffixes: T tokens of the tensor-parallel group, t one rank's shard, D width.

from __future__ import annotations

from torch import Tensor

from pcomm.core import Collectives, Layout
from pcomm.core.tensor_parallel import gather_replicated, split_replicated

__all__ = ["join_tokens", "split_tokens", "token_layout"]


def token_layout(num_tokens: int, size: int) -> Layout:
    """Which rank routes which tokens: shards that differ by at most one token."""
    return Layout.balanced(num_tokens, size)


def split_tokens(x_TD: Tensor, collectives: Collectives) -> Tensor:
    """This rank's tokens of replicated ones. Backward: an all-gather."""
    layout = token_layout(x_TD.shape[0], collectives.size)
    # A copy: a view that autograd keeps would keep the whole stream.
    return split_replicated(x_TD, layout, collectives, dim=0).clone()


def join_tokens(x_tD: Tensor, num_tokens: int, collectives: Collectives) -> Tensor:
    """All tokens, replicated, from each rank's shard: an all-gather. Backward is local."""
    layout = token_layout(num_tokens, collectives.size)
    return gather_replicated(x_tD, layout, collectives, dim=0)
