"""A forward may begin in another method of the model than `forward`."""

from __future__ import annotations

import torch

from fsdp_support.trainings import model_of, open_two, shard, tokens
from pcomm.core.testing.on_ranks import ranks


@ranks(2)
def test_another_entry_point_and_shapes(rank: int) -> None:
    reference = model_of()
    torch.stack([reference.loss(tokens(0, 0, r)) for r in (0, 1)]).sum().backward()
    with open_two() as groups:
        model = model_of()
        sharded = shard(model, groups, entry_points=["loss"], divisor=1)
        model.loss(tokens(0, 0, rank)).backward()
        for name, gradient in sharded.full_gradients().items():
            expected = reference.get_parameter(name)
            assert sharded.shapes[name] == expected.shape
            torch.testing.assert_close(gradient, expected.grad, rtol=1e-10, atol=1e-14)
