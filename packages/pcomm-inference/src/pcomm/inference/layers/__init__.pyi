from pcomm.inference.layers.flash_attention import varlen_call as varlen_call
from pcomm.inference.layers.int8_weight import Int8Weight as Int8Weight
from pcomm.inference.layers.int8_weight import quantize_int8 as quantize_int8
from pcomm.inference.layers.norm import Norm as Norm
from pcomm.inference.layers.packed_weight import PackedWeight as PackedWeight
from pcomm.inference.layers.packed_weight import pack_weights as pack_weights
from pcomm.inference.layers.residual_stream import ResidualStream as ResidualStream
