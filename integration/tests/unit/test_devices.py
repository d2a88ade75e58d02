"""Devices that a user names, and those that this machine does not have."""

from __future__ import annotations

import logging

import pytest
import torch

from pcomm.core.errors import ConfigError
from pcomm.integration.llm import LLM
from pcomm.integration.llm.weight_form import device_of
from pcomm.integration.precision import tell_device


def test_devices_that_are_here_are_taken():
    assert device_of("cpu") == torch.device("cpu")
    assert device_of(torch.device("meta")) == torch.device("meta")


@pytest.mark.parametrize("name", ["tpu", "", "cuda:99", "cuda:x", "meta", "cpu:-2"])
def test_others_are_refused_by_name(name, tmp_path):
    with pytest.raises(ConfigError, match="device: '"):
        LLM(tmp_path, device=name)


CPU, GPU = torch.device("cpu"), torch.device("cuda:1")
LEFT_OUT = "the 8 GPUs of this machine have no work. To use them run `torchrun --nproc-per-node 8 "


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "device", "rank", "line"),
    [
        (0, 1, CPU, 0, "1 rank on the CPU, bf16"),
        (0, 4, CPU, 0, "4 ranks, gloo between them, on the CPU, bf16"),
        (8, 8, GPU, 0, "8 ranks, nccl between them, on an H100 (cuda:1), bf16"),
        (8, 1, GPU, 0, "1 rank on an H100 (cuda:1), bf16"),
        (8, 8, CPU, 0, "8 ranks, gloo between them, on the CPU, bf16"),
        (8, 8, CPU, 1, "8 ranks, gloo between them, on the CPU, bf16"),
    ],
)
def test_a_run_says_on_what_it_computes_and_warns_of_gpus_without_work(
    num_gpus, num_ranks, device, rank, line, monkeypatch, caplog
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an H100")
    with caplog.at_level(logging.INFO, "pcomm.train"):
        tell_device("bf16", "the GPU has it", num_ranks, device, rank=rank)
    first, *warnings = (record.getMessage() for record in caplog.records)
    assert first == f'{line} (train.dtype = "auto": the GPU has it)'
    is_told = num_gpus > 0 and device == CPU and rank == 0
    assert [LEFT_OUT in warning for warning in warnings] == [True] * is_told


@pytest.mark.parametrize(
    ("dtype", "why", "device", "rank", "is_warned"),
    [
        ("fp32", "", GPU, 0, True),
        ("fp32", "", GPU, 1, False),
        ("bf16", "", GPU, 0, False),
        ("fp32", "the GPU has no bf16", GPU, 0, False),
        ("fp32", "", CPU, 0, False),
    ],
)
def test_what_fp32_leaves_unused_of_a_gpu_is_said(
    dtype, why, device, rank, is_warned, monkeypatch, caplog
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == GPU)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an H100")
    with caplog.at_level(logging.WARNING, "pcomm.train"):
        tell_device(dtype, why, 2, device, rank=rank)
    assert ['train.dtype = "auto" takes bf16' in line for line in caplog.messages] == (
        [True] * is_warned
    )
