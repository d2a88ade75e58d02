"""Layers split over a tensor-parallel group, which on one rank are plain torch functions."""

from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.core.tensor_parallel.cross_entropy import vocabulary_parallel_cross_entropy
    from pcomm.core.tensor_parallel.embedding import VocabularyParallelEmbedding
    from pcomm.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
    from pcomm.core.tensor_parallel.mappings import gather_replicated, split_replicated
    from pcomm.core.tensor_parallel.norms import sum_of_squares
    from pcomm.core.tensor_parallel.param_layout import (
        ParamLayout,
        join_shards,
        param_layouts_of,
        take_shard,
    )

__all__ = [
    "ColumnParallelLinear",
    "ParamLayout",
    "RowParallelLinear",
    "VocabularyParallelEmbedding",
    "gather_replicated",
    "join_shards",
    "param_layouts_of",
    "split_replicated",
    "sum_of_squares",
    "take_shard",
    "vocabulary_parallel_cross_entropy",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "ColumnParallelLinear": "linear",
        "ParamLayout": "param_layout",
        "RowParallelLinear": "linear",
        "VocabularyParallelEmbedding": "embedding",
        "gather_replicated": "mappings",
        "join_shards": "param_layout",
        "param_layouts_of": "param_layout",
        "split_replicated": "mappings",
        "sum_of_squares": "norms",
        "take_shard": "param_layout",
        "vocabulary_parallel_cross_entropy": "cross_entropy",
    },
)
