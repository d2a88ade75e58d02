"""What `GradSync` has to do on a rank alone: kinds of gradients, and its end."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ntp_support.sync_alone import plan_alone, sync_alone
from ntp_support.tagged_sums import tags
from pcomm.core.errors import ClosedError, ConfigError
from pcomm.ntp import GradSync


def test_sparse_gradients_become_dense() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    sync = sync_alone(model)
    for is_last in (False, True):
        with sync.accumulate(is_last=is_last, weight=1.0 + is_last):
            model(torch.tensor([1, 1, 3])).sum().backward()
    sync.finish()
    expected = torch.tensor([0.0, 6.0, 0.0, 3.0])[:, None].expand(4, 2)
    assert torch.equal(model.weight.grad, expected)


def test_hooks_end_with_it_with_its_groups_and_with_the_last_reference() -> None:
    for end in ("close", "groups", "abandon", "drop"):
        model = nn.Linear(2, 1)
        made, groups = plan_alone()
        sync = GradSync(made, model, groups, rank=0)
        alive = weakref.ref(sync)
        match end:
            case "close":
                sync.close()
                sync.close()
                assert groups._closing.take_all() == []
            case "groups":
                groups.close()
            case "abandon":
                groups.abandon()
        if end != "drop":
            for call in (sync.finish, sync.zero_grad, sync.grad_norm):
                with pytest.raises(ClosedError):
                    call()
            del call
        del sync
        assert alive() is None, end
        model(torch.ones(1, 2)).sum().backward()
        assert not (end != "drop" and model.weight._post_accumulate_grad_hooks)


def test_gradients_of_a_compiled_model_are_summed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    plain = copy.deepcopy(model)
    sync = sync_alone(model, bucket_bytes=1)
    compiled, x = torch.compile(model, backend="aot_eager"), torch.ones(2, 3)
    for turn, weight in enumerate((1.0, 0.5)):
        # What finds equal expressions imports all of inductor, of which this backend uses nothing.
        with (
            sync.accumulate(is_last=turn == 1, weight=weight),
            torch._functorch.config.patch(cse=False),
        ):
            compiled(x).sum().backward()
        (plain(x).sum() * weight).backward()
    sync.finish()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_backward_that_is_differentiated_again() -> None:
    """Sums are written into gradients that belong to a graph, and are not part of it."""
    model = nn.Linear(2, 1)
    sync, x = sync_alone(model, bucket_bytes=1), torch.ones(1, 2)
    y = model(x)
    with sync.accumulate(weight=0.5), pytest.warns(UserWarning, match="reference cycle"):
        y.square().sum().backward(create_graph=True)
    sync.finish()
    assert model.bias.grad is not None
    assert torch.equal(model.bias.grad, y.detach()[0])
    # Or parameters and gradients keep each other.
    sync.zero_grad()


def test_gradients_that_a_caller_asks_for_have_no_weight() -> None:
    """Those of `autograd.grad`, in a micro-batch of another weight than the first, and after it."""
    model, asked = nn.Linear(2, 1, bias=False), []
    sync, x = sync_alone(model, param_layouts={}), torch.tensor([4.0, 8.0])
    with sync.accumulate(is_last=False, weight=0.5):
        model(x).backward()
    with sync.accumulate(weight=0.25):
        asked += torch.autograd.grad(model(x), model.weight)
        model(x).backward()
    sync.finish()
    asked += torch.autograd.grad(model(x), model.weight)
    assert [gradient.tolist() for gradient in asked] == 2 * [[[4.0, 8.0]]]
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[3.0, 6.0]]


def test_dropped_gradients_inference_mode_and_parameters_that_are_frozen_meanwhile() -> None:
    model = nn.Linear(2, 1)
    sync = sync_alone(model, param_layouts={})
    with sync.accumulate():
        (model.weight * torch.tensor([3.0, 4.0])).sum().backward()
    with torch.inference_mode():
        sync.finish()
        assert float(sync.clip_grad_norm_(1.0)) == 5.0
    assert model.bias.grad is not None
    assert not model.bias.grad.is_inference()
    model.bias.grad = None
    assert float(sync.clip_grad_norm_(1.0)) == pytest.approx(1.0)
    # A parameter that was frozen meanwhile is named, and not torch's internals.
    sync.zero_grad()
    with sync.accumulate(is_last=False):
        model(torch.ones(2)).backward()
    model.bias.requires_grad_(False)
    with pytest.raises(ConfigError, match="'bias'"), sync.accumulate(weight=0.5):
        pass


def test_the_norm_of_complex_gradients_is_not_rounded_as_it_grows() -> None:
    model = nn.Module()
    model.register_parameter("x", nn.Parameter(torch.zeros(300_000, dtype=torch.complex64)))
    generator = torch.Generator().manual_seed(0)
    parts = torch.randint(-20, 21, (2, 300_000), generator=generator).float()
    upstream = torch.complex(*parts)
    sync = sync_alone(model, param_layouts={})
    with sync.accumulate():
        (model.x * upstream).sum().real.backward()
    sync.finish()
    expected = float(upstream.to(torch.complex128).abs().square().sum().sqrt())
    assert float(sync.grad_norm()) == pytest.approx(expected, rel=1e-6)


def test_the_store_is_enough_to_agree() -> None:
    """No process group of torch is begun: recovery makes groups without one."""
    assert not dist.is_initialized()
    sync_alone(nn.Linear(2, 1)).close()
    assert tags(0).keys() == tags(1).keys()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no grad_dtype yet")
def test_gradients_of_another_type_than_their_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)).bfloat16()
    unused = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    model.register_parameter("unused", unused)
    for parameter in (unused, model[0].weight):
        parameter.grad_dtype = torch.float32
    sync = sync_alone(model, param_layouts={})
    small = torch.full((1, 2), 2.0**-9, dtype=torch.bfloat16)
    for is_last in (False, True):
        with sync.accumulate(is_last=is_last):
            model[0](small if is_last else small * 2**9).sum().backward()
    sync.finish()
    # 16 bits would drop the second one.
    assert model[0].weight.grad.tolist() == [[1 + 2.0**-9] * 2] * 2
    assert unused.grad is not None
    assert unused.grad.dtype == torch.float32
    assert model[1].weight.grad.dtype == torch.bfloat16
