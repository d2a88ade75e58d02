from pcomm.inference.layers.packed_weight import pack_weights as pack_weights
