"""Measures on a GPU what docs/gpu-kernels.md and docs/gpu-counts.md predict, with their shapes.

`gpu_measurements.py` prints the rows and `gpu_predictions.py` puts them beside the pages: a row has
the page's name of the case, and a number for each quantity. Nothing of this has run on a GPU.
"""

from __future__ import annotations

import ctypes
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

import gpu_counts
from bandwidth_model import GPUS, Gpu
from device_counter import bytes_of_launch
from gpu_predictions import OPTIMIZER, predictions
from pcomm.core.kernel_launch import KernelLaunch

__all__ = ["MAKERS", "Launched", "counts", "fitting", "kernels", "loaded", "seen_in"]

Rows = Iterator[dict[str, Any]]
# Shapes for a machine without a GPU, on which the code alone is carried out.
_TINY: dict[str, Any] = {
    "layers": 1, "width": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "mlp_width": 32,
}  # fmt: skip
_TINY_LAYERS = (
    {"width": 32, "heads": 2, "gdn_key_heads": 1, "gdn_value_heads": 2, "gdn_key_dim": 16,
     "gdn_value_dim": 16},
    {"width": 32, "heads": 2, "mamba_heads": 4, "mamba_head_dim": 16},
    {"width": 32, "heads": 2, "kv_heads": 2, "head_dim": 16},
)  # fmt: skip


# -- kernels -----------------------------------------------------------------------------------


def kernels(device: torch.device) -> Rows:
    """Each kernel of the page: what the driver says of its code, and its share of the bandwidth.

    A kernel that moves bytes between GPUs is loaded and not launched. The share is that of the
    page's GPU with the same architecture: an H200 has more bandwidth than its H100.
    """
    gpu = _gpu_of(device)
    if gpu is None:
        yield {"case": "not run: no kernel of the page is compiled for this device"}
        return
    from triton.testing import do_bench  # type: ignore[import-untyped]

    import gpu_kernels

    times, errors = _times(device, partial(do_bench, return_mode="median"))
    for package, names in _names_by_package(gpu).items():
        try:
            found = gpu_kernels.kernels(gpu, [package])
        except Exception as error:
            # An older torch or Triton, on which the launches of the page cannot be recorded.
            told = f"{type(error).__name__}: {error}"[:300]
            yield from ({"gpu": gpu.name, "case": name, "error": told} for name in names)
            continue
        for kernel in found:
            yield _row(kernel, gpu, device, times, errors)


def _names_by_package(gpu: Gpu) -> dict[str, list[str]]:
    """The kernels of the page."""
    found: dict[str, dict[str, None]] = {}
    for one in predictions():
        if one.device == gpu.name:
            found.setdefault(one.package, {})[one.case] = None
    return {package: list(names) for package, names in found.items()}


def _row(
    kernel: Any, gpu: Gpu, device: torch.device, times: Mapping[Any, Any], errors: Sequence[str]
) -> dict[str, Any]:
    row: dict[str, Any] = {"gpu": gpu.name, "case": kernel.name}
    try:
        row |= loaded(kernel, device)
        if not kernel.over_link:
            made = times.get((kernel.name, kernel.num_blocks))
            if made is None:
                why = "; ".join(errors) or f"no launch had {kernel.num_blocks} blocks"
                raise LookupError(why)
            moved, ms = made
            share = 100 * moved / (ms / 1e3) / gpu.bytes_per_s
            row |= {"us": round(1e3 * ms, 2), "MB": round(moved / 1e6, 2)}
            row["share %"] = round(share, 1)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    return row


def _gpu_of(device: torch.device) -> Gpu | None:
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return next((gpu for gpu in GPUS if gpu.capability == 10 * major + minor), None)


def loaded(kernel: Any, device: torch.device) -> dict[str, int]:
    """Registers, spilled bytes and blocks that fit, as the driver says of the code of a kernel."""
    from triton.runtime import driver  # type: ignore[import-untyped]

    made = kernel.compile()
    index, shared = device.index or 0, made.code.shared_bytes
    load = driver.active.utils.load_binary
    _, function, registers, spilled, _ = load(kernel.name, made.code.cubin, shared, index)
    fit = fitting(ctypes.CDLL("libcuda.so.1"), function, 32 * made.num_warps, shared)
    # Triton divides the driver's bytes by those of a register.
    return {"registers": registers, "spilled": 4 * spilled, "fit": fit}


def fitting(library: Any, function: int, threads: int, shared: int) -> int:
    """Blocks of a function that a multiprocessor takes at a time, as the driver computes it."""
    found = ctypes.c_int()
    ask = library.cuOccupancyMaxActiveBlocksPerMultiprocessor
    arguments = ctypes.c_void_p(function), ctypes.c_int(threads), ctypes.c_size_t(shared)
    if error := ask(ctypes.byref(found), *arguments):
        raise RuntimeError(f"cuOccupancyMaxActiveBlocksPerMultiprocessor returned {error}")
    return found.value


class Launched(NamedTuple):
    """A launch that was made, and the bytes that it moves by the count of the page."""

    launch: KernelLaunch
    moved: int

    @property
    def key(self) -> tuple[str, int]:
        """Name and number of blocks, by which a row of the page is found."""
        return self.launch.kernel.__name__, prod(self.launch.grid)


def _times(
    device: torch.device, ms_of: Callable[[Callable[[], None]], float]
) -> tuple[dict[tuple[str, int], tuple[int, float]], list[str]]:
    """Bytes and milliseconds of the launches by their keys, and what could not be launched."""
    found: dict[tuple[str, int], tuple[int, float]] = {}
    errors: list[str] = []
    for make in MAKERS:
        try:
            for made in make(device):
                # The last of several that are equal in both: each moves about as much.
                found[made.key] = made.moved, ms_of(made.launch.run)
        except Exception as error:
            errors.append(f"{make.__name__}: {type(error).__name__}: {error}"[:200])
            torch.cuda.empty_cache()
    return found, errors


def _of_layer(device: torch.device) -> Iterator[Launched]:
    """Those of a layer of Gated DeltaNet, forward and backward."""
    with _kept() as launches:
        mixer, x, context = gpu_counts.layer_of(next(iter(gpu_counts.SHAPES)), device)
        _fill([x, *mixer.parameters()])
        y = mixer(x, context)
        torch.autograd.grad(y, [x, *mixer.parameters()], torch.empty_like(y))
    yield from _different(launches, {})


def _of_packs(device: torch.device) -> Iterator[Launched]:
    """Those that pack and unpack what such a layer exchanges."""
    import gpu_kernels

    yield from _different(list(gpu_kernels.pack_launches(device)), {})


def _of_steps(device: torch.device) -> Iterator[Launched]:
    """Those of steps of an engine, which are carried out where a graph would be replayed."""
    model = _llama(device, gpu_counts.LLAMA_8B, gpu_counts.VOCABULARY)
    with gpu_counts.replayed():
        for step in gpu_counts.asked():
            engine = gpu_counts.ready(step, model, gpu_counts.VOCABULARY, device)
            sizes = gpu_counts.kernel_bytes_of(engine, step.params)
            with _kept() as launches:
                gpu_counts.done(engine)
            yield from _different(launches, sizes)
            engine.close()


# What launches the kernels of the page, each once for each number of blocks.
MAKERS: Sequence[Callable[[torch.device], Iterator[Launched]]] = (_of_layer, _of_packs, _of_steps)


@contextmanager
def _kept() -> Iterator[list[KernelLaunch]]:
    """The launches that are made within."""
    found: list[KernelLaunch] = []
    run = KernelLaunch.run

    def keep(launch: KernelLaunch) -> None:
        run(launch)
        found.append(launch)

    with mock.patch.object(KernelLaunch, "run", keep):
        yield found


def _different(
    launches: list[KernelLaunch], sizes: Mapping[str, Callable[..., int]]
) -> Iterator[Launched]:
    last: dict[tuple[str, int], Launched] = {}
    for launch in launches:
        moved = bytes_of_launch(launch.kernel.__name__, (), launch.arguments, sizes)
        made = Launched(launch, moved)
        last[made.key] = made
    yield from last.values()


# -- counts ------------------------------------------------------------------------------------


def counts(device: torch.device, fast: bool) -> Rows:
    """Launches, waits and uploads of the steps and layers of the page, as the profiler sees them.

    On a CPU it profiles tiny shapes, and the rows have no numbers.
    """
    for rows in (_steps(device, fast), _layers(device, fast), _optimizer(device, fast)):
        yield from rows


def _steps(device: torch.device, fast: bool) -> Rows:
    sizes, vocabulary = (_TINY, 64) if fast else (gpu_counts.LLAMA_8B, gpu_counts.VOCABULARY)
    model = _llama(device, sizes, vocabulary)
    for step in gpu_counts.asked(32, 16, 64) if fast else gpu_counts.asked():
        row: dict[str, Any] = {"case": step.name}
        try:
            # Libraries begin with launches of their own; then the step, and what is behind it.
            for behind in (None, False, True):
                engine = gpu_counts.ready(step, model, vocabulary, device)
                if behind is None:
                    gpu_counts.done(engine)
                else:
                    seen = _seen_of(engine) if behind else _seen(partial(gpu_counts.done, engine))
                    row |= {"choosing": seen.get("launches")} if behind else seen
                engine.close()
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        yield row


def _llama(device: torch.device, sizes: Mapping[str, Any], vocabulary: int) -> Any:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = gpu_counts.any_model(sizes, vocabulary, device, dtype)
    _fill(model.parameters())
    return model


def _fill(tensors: Iterable[Any]) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.normal_(0, 0.02)


def _layers(device: torch.device, fast: bool) -> Rows:
    for name, tiny in zip(gpu_counts.SHAPES, _TINY_LAYERS, strict=True):
        row: dict[str, Any] = {"case": name}
        try:
            given: dict[str, Any] = {"tokens": 64, **tiny} if fast else {}
            there, back = _seen_both(*gpu_counts.layer_of(name, device, **given))
            if there and back:
                row |= {
                    "launches forward": there["launches"],
                    "launches backward": back["launches"],
                }
                row["waits"] = there["waits"] + back["waits"]
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        yield row


def _seen_both(mixer: Any, x: torch.Tensor, context: Any) -> tuple[dict[str, int], dict[str, int]]:
    """What a mixer asks for forward and backward."""
    leaves = [x, *mixer.parameters()]
    _fill(leaves)
    made: list[torch.Tensor] = []

    def forward() -> None:
        made[:] = [mixer(x, context)]

    def backward() -> None:
        torch.autograd.grad(made[0], leaves, made[0].detach())

    # Libraries begin with launches of their own.
    forward()
    backward()
    return _seen(forward), _seen(backward)


def _optimizer(device: torch.device, fast: bool) -> Rows:
    sizes, vocabulary = (_TINY, 64) if fast else (gpu_counts.GPT_1B, gpu_counts.VOCABULARY)
    optimizer, model = gpu_counts.adamw_of(sizes, vocabulary, device)
    _fill([*model.parameters(), *(one.grad for one in model.parameters())])
    optimizer.step()
    seen = _seen(optimizer.step)
    yield {"case": OPTIMIZER, **{name: seen[name] for name in ("launches", "waits") if seen}}


def _seen_of(engine: Any) -> dict[str, int]:
    """What a step asks for behind the logits."""
    profiler, run = _profiler(), engine._runner.run

    def then_begin(*given: Any) -> Any:
        found = run(*given)
        _synchronise()
        profiler.start()
        return found

    with mock.patch.object(engine._runner, "run", then_begin):
        gpu_counts.done(engine)
    return _stopped(profiler)


def _seen(run: Callable[[], object]) -> dict[str, int]:
    """What a call asks the device for; nothing where there is none."""
    _synchronise()
    profiler = _profiler()
    profiler.start()
    run()
    return _stopped(profiler)


def _profiler() -> profile:
    on_gpu = torch.cuda.is_available()
    return profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])


def _stopped(profiler: profile) -> dict[str, int]:
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text())
    return seen_in(trace) if torch.cuda.is_available() else {}


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seen_in(trace: Mapping[str, Any]) -> dict[str, int]:
    """Launches, waits and uploads in a trace of torch's profiler.

    Copies and fills on the device are launches, copies from it are part of a wait. Waits for the
    whole device are the profiler's own.
    """
    events = [one for one in trace["traceEvents"] if one.get("ph") == "X"]
    launches = waits = uploads = 0
    for one in events:
        kind, name = one.get("cat", ""), one["name"]
        uploads += kind == "gpu_memcpy" and "HtoD" in name
        is_inside = kind == "gpu_memcpy" and "HtoD" not in name and "DtoH" not in name
        launches += kind in ("kernel", "gpu_memset") or is_inside
        is_call = kind in ("cuda_runtime", "cuda_driver")
        waits += is_call and name in ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")
    return {"launches": launches, "waits": waits, "uploads": uploads}
