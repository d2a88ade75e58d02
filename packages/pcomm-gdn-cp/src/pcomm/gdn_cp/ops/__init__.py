"""The mixers' mathematics on one process: packed sequences in, packed sequences out."""

from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.gdn_cp.ops.backend import Kernels, choose_kernels
    from pcomm.gdn_cp.ops.causal_conv1d import causal_convolution, convolution_step
    from pcomm.gdn_cp.ops.gated_delta_rule.chunk import DeltaChunks
    from pcomm.gdn_cp.ops.gated_delta_rule.recurrent import gated_delta_step
    from pcomm.gdn_cp.ops.gated_delta_rule.rule import (
        chunk_gated_delta_rule,
        delta_gates,
        normalise_queries_keys,
    )
    from pcomm.gdn_cp.ops.mamba2_ssd.chunk import StateSpaceChunks
    from pcomm.gdn_cp.ops.mamba2_ssd.recurrent import state_space_step
    from pcomm.gdn_cp.ops.mamba2_ssd.ssd import chunk_state_space
    from pcomm.gdn_cp.ops.norms import gate_then_rms_norm, rms_norm_then_gate

__all__ = [
    "DeltaChunks",
    "Kernels",
    "StateSpaceChunks",
    "causal_convolution",
    "choose_kernels",
    "chunk_gated_delta_rule",
    "chunk_state_space",
    "convolution_step",
    "delta_gates",
    "gate_then_rms_norm",
    "gated_delta_step",
    "normalise_queries_keys",
    "rms_norm_then_gate",
    "state_space_step",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "DeltaChunks": "gated_delta_rule.chunk",
        "Kernels": "backend",
        "StateSpaceChunks": "mamba2_ssd.chunk",
        "causal_convolution": "causal_conv1d",
        "choose_kernels": "backend",
        "chunk_gated_delta_rule": "gated_delta_rule.rule",
        "chunk_state_space": "mamba2_ssd.ssd",
        "convolution_step": "causal_conv1d",
        "delta_gates": "gated_delta_rule.rule",
        "gate_then_rms_norm": "norms",
        "gated_delta_step": "gated_delta_rule.recurrent",
        "normalise_queries_keys": "gated_delta_rule.rule",
        "rms_norm_then_gate": "norms",
        "state_space_step": "mamba2_ssd.recurrent",
    },
)
