"""What was predicted beside what was measured: every number of the pages, with rows made up."""

from __future__ import annotations

import ctypes
import json
import re
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import gpu_measurements
import gpu_predictions
from first_gpu_hour import STAGE_OF
from gpu_predictions import MEASURED_BY, OPTIMIZER, Joined, Prediction, join, predictions, table

H100 = "H100 SXM"
PAGES = {name: (gpu_predictions.DOCS / f"{name}.md").read_text() for name in MEASURED_BY}


def of(case: str, quantity: str, predicted: float, device: str = H100) -> Prediction:
    page = "gpu-kernels" if device else "gpu-counts"
    return Prediction(page, device, case, quantity, predicted, "gdn-cp" if device else "")


def line(name: str, *rows: dict[str, Any], status: str = "ok") -> dict[str, Any]:
    return {"name": name, "status": status, "rows": rows}


# -- what the pages say ------------------------------------------------------------------------


def test_each_number_of_the_pages_is_a_prediction():
    found = Counter((one.page, one.device, one.quantity) for one in predictions())
    kernels, counts = PAGES["gpu-kernels"], PAGES["gpu-counts"]
    a_gpu = len(re.findall(r"^\| [\w-]+ \| `", kernels, re.MULTILINE)) // 2
    assert a_gpu > 30
    for gpu in (H100, "B200"):
        for quantity in ("registers", "spilled", "fit", "share %"):
            assert found.pop(("gpu-kernels", gpu, quantity)) == a_gpu
    served = counts.partition("## Serving")[2].partition("## Training")[0].count("\n| ") - 1
    assert served == 7
    expected = dict.fromkeys(("attention launches", "choosing", "uploads"), served)
    expected |= dict.fromkeys(("launches", "GB"), served + 1) | {"waits": served + 3 + 1}
    expected |= dict.fromkeys(("launches forward", "launches backward"), 3)
    expected |= dict.fromkeys(("GB forward", "GB backward"), 3) | {"peak GB": 4}
    assert {quantity: number for (_, _, quantity), number in found.items()} == expected


def test_numbers_are_those_of_the_tools_that_write_the_pages():
    """Their own lines, in a table with their own head."""
    pytest.importorskip("triton", reason="triton has wheels for Linux only")
    from bandwidth_model import GPUS, Needs
    from gpu_kernels import _COLUMNS, Kernel, Row, _line
    from machine_code import Reading

    kernel = Kernel("gdn-cp", "sum_kernel", 20_000, compile=None)
    one = Row(kernel, GPUS[0], Needs(4, 40, 1024), 48, Reading(Counter({16: 1})))
    text = f"## {GPUS[0].name}, sm_90\n\n{_line(*_COLUMNS)}{'|---' * len(_COLUMNS)}|\n{one.text()}"
    found = {part.quantity: part.predicted for part in gpu_predictions._of_kernels(text)}
    share = round(100 * one.share)
    assert 20 < share < 100
    assert found == {"registers": 40, "spilled": 48, "fit": 12, "share %": share}


def test_some_numbers_of_the_page_of_counts():
    found = {(one.case, one.quantity): one.predicted for one in predictions() if not one.device}
    (launches,) = re.findall(
        r"^\| a prompt of 2,048 \| (\d+) \|", PAGES["gpu-counts"], re.MULTILINE
    )
    assert found["a prompt of 2,048", "launches"] == int(launches)
    (update,) = re.findall(r"parameters is (\d+) launches", PAGES["gpu-counts"])
    assert found[OPTIMIZER, "launches"] == int(update)
    assert found["1B, 1 rank, blocks kept", "peak GB"] > 30


@pytest.mark.parametrize("cell", ["", "-", "yes"])
def test_a_cell_without_a_number_is_no_prediction(cell):
    with pytest.raises(ValueError, match="no number"):
        gpu_predictions._number(cell)


# -- the join ------------------------------------------------------------------------------------


def test_a_measured_number_stands_beside_the_predicted_one():
    asked = [of("scan_kernel", "registers", 250), of("a", "waits", 1, ""), of("b", "waits", 0, "")]
    rows = {"gpu": H100, "case": "scan_kernel", "registers": 200}
    counts = ({"case": "a", "waits": 3}, {"case": "b", "waits": 0})
    found = join(asked, [line("kernels", rows), line("counts", *counts)], STAGE_OF)
    assert [(one.measured, one.ratio) for one in found] == [(200, 0.8), (3, 3.0), (0, 1.0)]
    text = table(found, "NVIDIA H100")
    assert "| H100 SXM, scan_kernel, registers | 250 | 200 | 0.80 |" in text
    assert "3 of 3 predictions were measured" in text
    assert "Not measured" not in text


def test_of_a_command_the_newest_line_counts():
    lines = [line("counts", {"case": "a", "waits": number}) for number in (4, 2)]
    (found,) = join([of("a", "waits", 1, "")], lines, STAGE_OF)
    assert found.measured == 2


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "`kernels` of stage 5 was not asked for"),
        ([line("kernels", status="needs a GPU")], "`kernels` of stage 5: needs a GPU"),
        ([line("kernels", status="ended with 1")], "`kernels` of stage 5: ended with 1"),
        (
            [line("kernels", {"gpu": H100, "case": "other", "fit": 1}, status="ended with 1")],
            "`kernels` of stage 5: ended with 1",
        ),
        (
            [line("kernels", {"gpu": H100, "case": "scan_kernel", "error": "LookupError: no"})],
            "`kernels` of stage 5: LookupError: no",
        ),
        (
            [line("kernels", {"gpu": "B200", "case": "scan_kernel", "fit": 2})],
            "`kernels` of stage 5 ran on no H100 SXM",
        ),
        (
            [line("kernels", {"gpu": H100, "case": "scan_kernel", "fit": None})],
            "`kernels` of stage 5 told nothing of it",
        ),
    ],
)
def test_what_was_not_measured_has_its_reason(lines, reason):
    (found,) = join([of("scan_kernel", "fit", 2)], lines, STAGE_OF)
    assert (found.measured, found.ratio, found.reason) == (None, None, reason)
    assert f"- H100 SXM, scan_kernel: fit 2: {reason}\n" in table([found], "")


def test_rows_of_a_command_that_failed_later_count():
    rows = {"gpu": H100, "case": "scan_kernel", "fit": 1, "error": "RuntimeError: of its time"}
    asked = [of("scan_kernel", "fit", 2), of("scan_kernel", "share %", 56)]
    fit, share = join(asked, [line("kernels", rows, status="ended with 1")], STAGE_OF)
    assert (fit.measured, fit.ratio) == (1, 0.5)
    assert share.reason == "`kernels` of stage 5: RuntimeError: of its time"


def test_what_no_stage_can_measure_says_so():
    """Also where a row had such a number: it would be of something else."""
    link = of("all_gather_kernel", "share %", 58)._replace(package="nvls")
    memory = of("1B, 1 rank, blocks kept", "peak GB", 33.5, "")
    lines = [line("kernels", {"gpu": H100, "case": "all_gather_kernel", "share %": 9})]
    reasons = [one.reason for one in join([link, memory], lines, STAGE_OF)]
    assert reasons == [
        "no stage moves bytes between 8 GPUs",
        "no stage trains a model of this shape",
    ]
    # The same kernel's registers are loaded on one.
    own = link._replace(quantity="registers")
    assert own.never == ""


def test_every_prediction_is_in_the_table_once():
    """As many numbers as predictions, with all rows of one GPU and without any."""
    asked = predictions()
    rows = [
        {"gpu": H100, "case": one.case, one.quantity: one.predicted + 1}
        for one in asked
        if one.device == H100
    ]
    for lines in ([], [line("kernels", *rows)]):
        found = join(asked, lines, STAGE_OF)
        text = table(found, "")
        shown = Counter[tuple[str, str]]()
        for told in text.splitlines():
            if measured := re.fullmatch(
                r"\| (.+), ([\w %]+) \| [\d.]+ \| [\d.]+ \| [-\d.]+ \|", told
            ):
                shown[measured[1], measured[2]] += 1
            elif told.startswith("- "):
                case, numbers, _ = re.split(
                    r": (?=[\w %]+ [\d.]+[:,])|: (?=\D)", told[2:], maxsplit=2
                )
                for number in numbers.split(", "):
                    shown[case, number.rpartition(" ")[0]] += 1
        cases = Counter((gpu_predictions._case(one), one.quantity) for one in asked)
        assert shown == cases
        assert set(cases.values()) == {1}
        assert f"{sum(one.measured is not None for one in found)} of {len(asked)} pred" in text


def test_the_summary_has_what_is_farthest_first():
    parts = [(100, 95), (100, 20), (100, 300), (0, 7), (50, 50)]
    found = [Joined(of(str(n), "fit", old), new) for n, (old, new) in enumerate(parts)]
    head, *rest = gpu_predictions.summary([*found, Joined(of("5", "fit", 1), None, "no")], most=2)
    assert head == "  5 of 6 were measured, 3 are 10 % or more away"
    assert rest == [
        "    H100 SXM, 3, fit: 7, not 0",
        "    H100 SXM, 1, fit: 20, not 100",
    ]


def test_the_report_is_of_a_file_of_lines(tmp_path):
    file = tmp_path / "lines.jsonl"
    rows = {"gpu": H100, "case": "scan_kernel", "registers": 255}
    told = [line("versions", {"names": ["NVIDIA H100"]}), line("kernels", rows)]
    file.write_text("\n".join(map(json.dumps, told)))
    text, short = gpu_predictions.report(file, STAGE_OF)
    assert f"On NVIDIA H100: 1 of {len(predictions())} predictions" in text
    assert "| H100 SXM, scan_kernel, registers | 255 | 255 | 1.00 |" in text
    assert short == [f"  1 of {len(predictions())} were measured, 0 are 10 % or more away"]


# -- what measures ---------------------------------------------------------------------------------


def event(kind: str, name: str, phase: str = "X") -> dict[str, str]:
    return {"ph": phase, "cat": kind, "name": name}


def test_launches_waits_and_uploads_of_a_trace():
    from gpu_as_predicted import seen_in

    kernels = [event("kernel", "scan_kernel"), event("gpu_memset", "Memset (Device)")]
    copies = [event("gpu_memcpy", "Memcpy DtoD (Device -> Device)")]
    copies += 2 * [event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)")]
    copies += [event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)")]
    calls = [
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaLaunchKernel",
        "cudaGraphLaunch",
    ]
    others = [event("cuda_runtime", name) for name in calls]
    # Ranges, arrows and what the host does.
    others += [event("gpu_user_annotation", "ProfilerStep#1"), event("cpu_op", "aten::mm")]
    others += [event("ac2g", "ac2g", phase="s"), {"ph": "M", "name": "process_name"}]
    found = seen_in({"traceEvents": [*kernels, *copies, *others]})
    assert found == {"launches": 3, "waits": 1, "uploads": 2}


@pytest.mark.skipif(torch.cuda.is_available(), reason="measured there, and not with tiny shapes")
def test_counts_are_carried_out_with_tiny_shapes():
    """One row for each case of the page but those of memory; without a GPU it has no numbers."""
    pytest.importorskip("triton", reason="triton has wheels for Linux only")
    rows = list(gpu_measurements.MEASUREMENTS["counts"](True))
    assert [row for row in rows if "error" in row] == []
    assert len(rows) == 7 + 3 + 1
    assert [key for row in rows for key, value in row.items() if key != "case" and value] == []
    (told,) = gpu_measurements.MEASUREMENTS["kernels"](True)
    assert told["case"].startswith("not run")


def test_cases_and_quantities_of_the_rows_are_those_of_the_page(monkeypatch):
    """With a trace made up: else a name that is written in two places would never be found."""
    pytest.importorskip("triton", reason="triton has wheels for Linux only")
    import gpu_as_predicted

    wanted = {(one.case, one.quantity) for one in predictions() if not one.device and not one.never}
    seen = {"launches": 5, "waits": 1, "uploads": 1}
    monkeypatch.setattr(gpu_as_predicted, "_stopped", lambda profiler: profiler.stop() or seen)
    small, cpu = gpu_as_predicted.gpu_counts.asked(32, 16, 64), torch.device("cpu")
    of_page = {
        a.name: b.name for a, b in zip(small, gpu_as_predicted.gpu_counts.asked(), strict=True)
    }
    rows = list(gpu_as_predicted.counts(cpu, fast=True))
    found = {
        (of_page.get(row["case"], row["case"]), quantity)
        for row in rows
        for quantity in set(row) - {"case"}
    }
    assert found == wanted


def test_each_kernel_of_the_page_is_launched_with_as_many_blocks():
    """On tensors without memory; as on a GPU but for the launch itself."""
    pytest.importorskip("triton", reason="triton has wheels for Linux only")
    from torch.nn.attention.varlen import varlen_attn_out

    import gpu_counts
    from device_counter import counting
    from gpu_as_predicted import MAKERS
    from pcomm.inference.attention import on_device

    meta = torch.device("meta")
    chunks = mock.patch.object(on_device, "varlen_call", return_value=varlen_attn_out)
    # Weights need not be filled.
    filled = mock.patch("gpu_as_predicted._fill")
    with chunks, filled, gpu_counts._no_autocast(), counting():
        made = {one.key: one.moved for make in MAKERS for one in make(meta)}
    section = PAGES["gpu-kernels"].partition(f"## {H100}")[2].partition("## B200")[0]
    rows = re.findall(r"^\| (\S+) \| `(\w+)` \| ([\d,]+) \|", section, re.MULTILINE)
    wanted = {
        (name, int(blocks.replace(",", ""))) for package, name, blocks in rows if package != "nvls"
    }
    assert len(wanted) > 20
    assert wanted - set(made) == set()
    assert min(made[key] for key in wanted) > 0


def test_what_the_driver_says_of_a_kernel_is_asked_of_the_code_that_was_loaded(monkeypatch):
    pytest.importorskip("triton", reason="triton has wheels for Linux only")
    from triton.runtime import driver

    import gpu_as_predicted
    from core_support.fake_driver import fake_driver
    from gpu_kernels import Compiled, Kernel

    code = SimpleNamespace(cubin=b"\x7fELF", shared_bytes=2048)
    kernel = Kernel("gdn-cp", "sum_kernel", 512, partial(Compiled, code, 4, 0))
    loads, asks = [], []

    def load(*given):
        loads.append(given)
        return 1, 99, 40, 12, 1024

    def occupancy(found, function, threads, shared):
        asks.append((function.value, threads.value, shared.value))
        found._obj.value = 3
        return 0

    library = SimpleNamespace(cuOccupancyMaxActiveBlocksPerMultiprocessor=occupancy)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    with fake_driver():
        monkeypatch.setattr(driver.active.utils, "load_binary", load)
        found = gpu_as_predicted.loaded(kernel, torch.device("cuda", 1))
    assert found == {"registers": 40, "spilled": 48, "fit": 3}
    assert loads == [("sum_kernel", b"\x7fELF", 2048, 1)]
    assert asks == [(99, 128, 2048)]
    library.cuOccupancyMaxActiveBlocksPerMultiprocessor = lambda *given: 400
    with pytest.raises(RuntimeError, match="returned 400"):
        gpu_as_predicted.fitting(library, 99, 128, 0)


def test_a_share_is_of_the_bytes_that_a_launch_moves_in_its_time(monkeypatch):
    """One is timed, one moves bytes between GPUs, one was never launched, others not recorded."""
    pytest.importorskip("triton", reason="triton has wheels for Linux only")
    import gpu_as_predicted
    import gpu_kernels
    from bandwidth_model import GPUS
    from gpu_as_predicted import Launched
    from pcomm.core.kernel_launch import KernelLaunch

    def kernel(package: str, name: str) -> gpu_kernels.Kernel:
        return gpu_kernels.Kernel(package, name, 6, compile=None)

    def made(name: str, blocks: tuple[int, ...]) -> Launched:
        named = SimpleNamespace(__name__=name)
        return Launched(KernelLaunch(named, blocks, {}, torch.device("cpu")), 67_000_000)

    def fails(device: torch.device) -> Any:
        yield made("other_kernel", (6,))
        raise RuntimeError("no room")

    page = [kernel("gdn-cp", "sum_kernel"), kernel("nvls", "far_kernel"), kernel("gdn-cp", "no")]
    monkeypatch.setattr(gpu_as_predicted, "_gpu_of", lambda device: GPUS[0])
    monkeypatch.setattr(gpu_as_predicted, "loaded", lambda kernel, device: {"registers": 40})

    def of_page(gpu: Any, packages: list[str]) -> list[gpu_kernels.Kernel]:
        found = [one for one in page if one.package in packages]
        if packages == ["inference"]:
            raise ImportError("an older torch")
        return found

    monkeypatch.setattr(gpu_kernels, "kernels", of_page)
    makers = [lambda device: iter([made("sum_kernel", (3, 2)), made("sum_kernel", (6, 2))]), fails]
    monkeypatch.setattr(gpu_as_predicted, "MAKERS", makers)
    monkeypatch.setattr("triton.testing.do_bench", lambda run, return_mode: 0.04)
    far, timed, missing, *others = gpu_as_predicted.kernels(torch.device("cpu"))
    # 67 MB in 40 us are half of 3.35 TB/s.
    assert timed == {
        "gpu": H100, "case": "sum_kernel", "registers": 40, "us": 40.0, "MB": 67.0, "share %": 50.0,
    }  # fmt: skip
    assert far == {"gpu": H100, "case": "far_kernel", "registers": 40}
    assert missing["registers"] == 40
    assert missing["error"] == "LookupError: fails: RuntimeError: no room"
    asked = [one for one in predictions() if one.device == H100 and one.package == "inference"]
    assert {row["case"] for row in others} == {one.case for one in asked}
    assert {row["error"] for row in others} == {"ImportError: an older torch"}
    joined = join(asked, [line("kernels", *others)], STAGE_OF)
    assert {one.reason for one in joined} == {"`kernels` of stage 5: ImportError: an older torch"}
