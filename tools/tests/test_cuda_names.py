"""Names of torch for CUDA, NCCL and symmetric memory that the packages use are in this torch.

A build of torch for CUDA has them on a machine without a GPU, too. The names of `torch.cuda` and of
`torch.distributed` are looked for in every build.
"""

import ast
import importlib
import inspect
from functools import reduce

import pytest
import torch
import torch.distributed as dist

from repository import ROOT, sources

needs_cuda_build = pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA")
PREFIXES = ("torch.cuda.", "torch.distributed.", "dist.", "distributed_c10d.", "symmetric.")
MODULES = {
    "dist": "torch.distributed",
    "distributed_c10d": "torch.distributed.distributed_c10d",
    "symmetric": "torch.distributed._symmetric_memory",
}
# A field of the doctor's own facts, and one of a group, which is None without one.
ELSEWHERE = {"torch.cuda.partition", "dist.group.WORLD.bound_device_id"}


def chain_of(node: ast.AST) -> str:
    """`a.b.c` of an attribute of a name, or an empty string."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def used_names() -> dict[str, str]:
    """Each name, and a file that has it."""
    found: dict[str, str] = {}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            name = chain_of(node)
            if name.startswith(PREFIXES) and name not in ELSEWHERE:
                found[name] = str(path.relative_to(ROOT))
    return found


def is_there(name: str) -> bool:
    first, *rest = name.split(".")
    try:
        module = importlib.import_module(MODULES.get(first, first))
        reduce(getattr, rest, module)
    except (AttributeError, ModuleNotFoundError):
        return False
    return True


def test_every_name_is_there():
    used = used_names()
    assert {"torch.cuda.MemPool", "torch.cuda.CUDAGraph", "dist.ProcessGroupNCCL"} <= {
        ".".join(name.split(".")[:3]) for name in used
    }
    # NCCL is in builds for CUDA alone.
    has_nccl = hasattr(dist, "ProcessGroupNCCL")
    missing = {
        name: path
        for name, path in used.items()
        if not is_there(name) and (has_nccl or "NCCL" not in name)
    }
    assert missing == {}
    assert not is_there("torch.cuda.no_such_name")


@needs_cuda_build
def test_every_wish_for_a_communicator_is_a_field_of_nccl():
    from pcomm.core.groups.spec import _NCCL_CONFIG, _nccl_options

    asked = dict.fromkeys(_NCCL_CONFIG, 1)
    options, refused = _nccl_options({**asked, "high_priority": True})
    assert refused == {}
    assert options.is_high_priority_stream
    assert {name: int(getattr(options.config, field)) for name, field in _NCCL_CONFIG.items()} == (
        asked
    )


@needs_cuda_build
def test_nccl_has_what_is_called_of_a_communicator():
    names = ("abort", "shutdown", "register_mem_pool", "deregister_mem_pool", "mem_allocator")
    assert [name for name in names if not hasattr(dist.ProcessGroupNCCL, name)] == []
    for name in ("register_mem_pool", "deregister_mem_pool"):
        told = getattr(dist.ProcessGroupNCCL, name).__doc__
        assert "MemPool" in told
    assert "symm" in dist.ProcessGroupNCCL.register_mem_pool.__doc__
    assert torch.cuda.nccl.version() >= (2, 27)


@needs_cuda_build
def test_symmetric_memory_has_what_is_called():
    module = importlib.import_module("torch.distributed._symmetric_memory")
    own = module._SymmetricMemory
    assert callable(module.set_signal_pad_size)
    assert list(inspect.signature(module.rendezvous).parameters)[:2] == ["tensor", "group"]
    # Sizes, strides, dtype and device, as they are passed.
    told = own.empty_strided_p2p.__doc__
    assert [part in told for part in ("size", "stride", "dtype", "device")] == [True] * 4
    fields = ("rank", "world_size", "buffer_ptrs", "signal_pad_ptrs", "multicast_ptr")
    assert [name for name in fields if not hasattr(own, name)] == []
