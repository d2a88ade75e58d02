"""The mixers' mathematics on one process: packed sequences in, packed sequences out."""

from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.gdn_cp.ops.backend import Kernels, choose_kernels
    from pcomm.gdn_cp.ops.causal_conv1d import causal_convolution, convolution_step
    from pcomm.gdn_cp.ops.gated_delta_rule.chunk import DeltaChunks, chunk_gated_delta_rule
    from pcomm.gdn_cp.ops.gated_delta_rule.gate import delta_gates
    from pcomm.gdn_cp.ops.gated_delta_rule.recurrent import gated_delta_step
    from pcomm.gdn_cp.ops.mamba2_ssd.chunk import SsdChunks, chunk_mamba2_ssd
    from pcomm.gdn_cp.ops.mamba2_ssd.recurrent import mamba2_ssd_step
    from pcomm.gdn_cp.ops.norms import (
        gate_then_rms_norm,
        normalise_queries_keys,
        rms_norm_then_gate,
    )

__all__ = [
    "DeltaChunks",
    "Kernels",
    "SsdChunks",
    "causal_convolution",
    "choose_kernels",
    "chunk_gated_delta_rule",
    "chunk_mamba2_ssd",
    "convolution_step",
    "delta_gates",
    "gate_then_rms_norm",
    "gated_delta_step",
    "mamba2_ssd_step",
    "normalise_queries_keys",
    "rms_norm_then_gate",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "DeltaChunks": "gated_delta_rule.chunk",
        "Kernels": "backend",
        "SsdChunks": "mamba2_ssd.chunk",
        "causal_convolution": "causal_conv1d",
        "choose_kernels": "backend",
        "chunk_gated_delta_rule": "gated_delta_rule.chunk",
        "chunk_mamba2_ssd": "mamba2_ssd.chunk",
        "convolution_step": "causal_conv1d",
        "delta_gates": "gated_delta_rule.gate",
        "gate_then_rms_norm": "norms",
        "gated_delta_step": "gated_delta_rule.recurrent",
        "mamba2_ssd_step": "mamba2_ssd.recurrent",
        "normalise_queries_keys": "norms",
        "rms_norm_then_gate": "norms",
    },
)
