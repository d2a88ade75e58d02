"""Devices that a user names, and those that this machine does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pcomm.core.errors import ConfigError
from pcomm.integration.llm import LLM
from pcomm.integration.llm.devices import device_of


def test_devices_that_are_here_are_taken() -> None:
    assert device_of("cpu") == torch.device("cpu")
    assert device_of(torch.device("meta")) == torch.device("meta")


@pytest.mark.parametrize("name", ["tpu", "", "cuda:99", "cuda:x", "meta", "cpu:-2"])
def test_others_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="device: '"):
        LLM(tmp_path, device=name)
