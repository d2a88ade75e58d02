"""`pcomm convert`: a run as a Hugging Face directory, and a directory as a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from pcomm.core.errors import ConfigError
from pcomm.integration.huggingface.directory import check_model_folder

__all__ = ["command"]


_DTYPES = ("fp32", "bf16", "fp16")


class ConvertCommand:
    """Converts weights, configuration and tokenizer in one direction or the other."""

    name = "convert"
    help = "Write a run as a Hugging Face directory, or such a directory as a run."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """`RUN_OR_DIR`, `--out`, `--dtype`, `--allow-not-finite`."""
        parser.add_argument(
            "source",
            type=Path,
            metavar="RUN_OR_DIR",
            help="the folder of a `pcomm train`, or a directory with config.json and safetensors",
        )
        parser.add_argument(
            "--out", type=Path, required=True, metavar="DIR", help="the folder to write"
        )
        parser.add_argument(
            "--dtype",
            choices=_DTYPES,
            help="dtype of the weights in a directory; default: that of the directory which the "
            "run started from, or fp32",
        )
        parser.add_argument(
            "--allow-not-finite",
            action="store_true",
            help="write NaN and infinite weights into a directory as they are",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Convert, then print what was written."""
        source, out = arguments.source, arguments.out
        is_directory = (source / "config.json").exists() and not (source / "config.toml").exists()
        if is_directory and arguments.dtype is not None:
            raise ConfigError(
                f"pcomm convert --dtype {arguments.dtype}",
                found=f"{source}, a Hugging Face directory, which becomes a run",
                why="A run keeps its weights in fp32, whatever it computes in.",
                fix="Leave --dtype away; `--set train.dtype=bf16` is what a run computes in.",
            )
        if is_directory and arguments.allow_not_finite:
            raise ConfigError(
                "pcomm convert --allow-not-finite",
                found=f"{source}, a Hugging Face directory, which becomes a run",
                why="The option is for the weights of a run: NaN of a directory is always refused.",
                fix="Leave --allow-not-finite away.",
            )
        check_model_folder(source)
        # Imported late, so that a mistake above does not wait for torch.
        from pcomm.integration.commands.conversion import directory_to_run, run_to_directory
        from pcomm.integration.huggingface.tensors import SHORT_NAMES

        if is_directory:
            kind = directory_to_run(source, out)
            print(f"{out}  a run with the weights of a {kind} model")
            print(f"pcomm generate {out} --prompt TEXT  writes text with it")
            print(f"pcomm train --config {out / 'config.toml'} --out {out}  trains it")
            return 0
        dtype = None if arguments.dtype is None else SHORT_NAMES[arguments.dtype]
        allowed = arguments.allow_not_finite
        kind = run_to_directory(source, out, dtype=dtype, allow_not_finite=allowed)
        print(f"{out}  a {kind} model, which transformers loads:")
        for file in sorted(out.iterdir()):
            print(f"  {file.name:<32}{file.stat().st_size:>16,} bytes")
        print(f"pcomm serve {out}  serves it")
        return 0


command = ConvertCommand()
