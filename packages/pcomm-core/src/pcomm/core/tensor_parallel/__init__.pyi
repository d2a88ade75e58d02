from pcomm.core.tensor_parallel.linear import ColumnParallelLinear as ColumnParallelLinear
from pcomm.core.tensor_parallel.linear import ReplaceableLinear as ReplaceableLinear
from pcomm.core.tensor_parallel.linear import RowParallelLinear as RowParallelLinear
from pcomm.core.tensor_parallel.linear import WeightProduct as WeightProduct
from pcomm.core.tensor_parallel.linear import check_no_gradient as check_no_gradient
from pcomm.core.tensor_parallel.linear import forget_weight as forget_weight
from pcomm.core.tensor_parallel.optimizers import sum_of_squares as sum_of_squares
from pcomm.core.tensor_parallel.split import ParamLayout as ParamLayout
from pcomm.core.tensor_parallel.split import gather_replicated as gather_replicated
from pcomm.core.tensor_parallel.split import join_shards as join_shards
from pcomm.core.tensor_parallel.split import param_layouts_of as param_layouts_of
from pcomm.core.tensor_parallel.split import split_replicated as split_replicated
from pcomm.core.tensor_parallel.split import take_shard as take_shard
from pcomm.core.tensor_parallel.vocabulary import (
    VocabularyParallelEmbedding as VocabularyParallelEmbedding,
)
from pcomm.core.tensor_parallel.vocabulary import (
    vocabulary_parallel_cross_entropy as vocabulary_parallel_cross_entropy,
)
