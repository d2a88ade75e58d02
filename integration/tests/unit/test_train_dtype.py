"""`train.dtype = "auto"`: what it chooses on which device, and what a run that goes on keeps."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import pytest
import torch

from integration_support.short_runs import run_words, write_words
from pcomm.integration import precision
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, TrainConfig
from pcomm.integration.precision import faster_dtype

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def processor(monkeypatch, *, amx: bool, avx512: bool, share: float | None = None) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    if share is not None:
        monkeypatch.setattr(precision, "_share_of_bf16", lambda width: share)


@pytest.mark.parametrize(
    ("amx", "avx512", "share", "dtype", "why"),
    [
        (True, True, 0.12, "bf16", "AMX and AVX512-BF16, with which a product takes 0.12 of its"),
        (False, True, 0.79, "bf16", "AVX512-BF16, with which a product takes 0.79"),
        (False, True, 0.8, "fp32", "AVX512-BF16, with which a product takes 0.80"),
        # There, and not in use, as where the system does not let a process have AMX.
        (True, True, 1.3, "fp32", "takes 1.30"),
        # Without instructions nothing is timed, so chance decides nothing.
        (False, False, 0.1, "fp32", "the processor has no bf16"),
    ],
)
def test_a_processor_is_asked_and_timed(amx, avx512, share, dtype, why, monkeypatch):
    processor(monkeypatch, amx=amx, avx512=avx512, share=share)
    found, told = faster_dtype(CPU, 256)
    assert found == dtype
    assert told.startswith(why) or why in told


def test_the_product_that_is_timed(monkeypatch):
    processor(monkeypatch, amx=True, avx512=True)
    # As wide as is timed at most; more says nothing more of a processor that has no bf16.
    monkeypatch.setattr(precision, "_WIDTH", 64)
    _, told = faster_dtype(CPU, 4096)
    share = float(told.split(" takes ")[1].split()[0])
    assert math.isfinite(share)
    assert share >= 0


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_gpu_is_asked_without_what_it_emulates(has_bf16, monkeypatch):
    asked: list[Mapping[str, bool]] = []
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda **how: asked.append(how) or has_bf16
    )
    assert faster_dtype(GPU, 256)[0] == ("bf16" if has_bf16 else "fp32")
    assert asked == [{"including_emulation": False}]


def test_without_a_device_auto_is_fp32():
    assert Config().train.dtype == "fp32"
    assert validate(Config(train=TrainConfig(dtype="auto")), 1).train.dtype == "fp32"


def test_a_run_that_goes_on_keeps_the_format_that_it_began_with(tmp_path, monkeypatch, caplog):
    text, run = write_words(tmp_path / "text"), tmp_path / "run"

    def told(*overrides: str, restart: bool = False) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO, "pcomm.train"):
            run_words(text, run, *overrides, must_restart=restart)
        return next(line for line in caplog.messages if "on the CPU" in line)

    auto = "train.dtype=auto"
    processor(monkeypatch, amx=True, avx512=True, share=0.2)
    assert told(auto, "train.steps=2").startswith("1 rank on the CPU, bf16 (train.dtype = ")
    # The next start is on a machine without bf16.
    processor(monkeypatch, amx=False, avx512=False)
    kept = told(auto, "train.steps=4")
    assert kept == '1 rank on the CPU, bf16 (train.dtype = "auto": as in the newest checkpoint)'
    # What the user wrote is kept, too.
    assert 'dtype = "auto"' in (run / "config.toml").read_text()
    assert told("train.dtype=fp32", "train.steps=6") == "1 rank on the CPU, fp32"
    processor(monkeypatch, amx=True, avx512=True, share=0.2)
    assert "CPU, fp32 (" in told(auto, "train.steps=8")
    assert "CPU, bf16 (" in told(auto, "train.steps=2", restart=True)
