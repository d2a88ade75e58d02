from pcomm.inference.quantization.int8_linear import Int8Linear as Int8Linear
from pcomm.inference.quantization.replace_linears import quantize_int8 as quantize_int8
