"""Write the pages of the documentation that list what the code declares.

    python tools/reference_pages.py

It also fills the marked tables of other pages, READMEs among them, with committed rows of
benchmarks. Tests compare the committed pages with what this would write.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter

import row_tables
from face_pages import face_pages
from pcomm.core import environment
from pcomm.integration.config.sections import SECTIONS, keys
from pcomm.integration.config.strict_section import toml_value
from repository import ROOT
from works_with import works_with_page

DOCS = ROOT / "docs"

ENVIRONMENT = """\
# Environment variables

The variables of pcomm itself. A value that cannot be read is an error, and so is a variable with
the prefix `PCOMM_` that is not in this table.

"""

OTHERS_HEAD = """
## Variables of launchers and libraries

pcomm reads those of launchers. Those of libraries decide what torch, gloo and Triton do under it.
`pcomm doctor` shows what is set of `NCCL_*`, `TORCH_*`, `GLOO_*`, `CUDA_*`, `OMP_NUM_THREADS` and
the two of instructions.

"""

OTHERS = {
    "RANK": ("a launcher", "Number of this process in the job; logs name it."),
    "WORLD_SIZE": ("a launcher", "Number of processes. Without it and `RANK` a process is alone."),
    "MASTER_ADDR": ("a launcher", "Host of rank 0, where the ranks find each other."),
    "MASTER_PORT": ("a launcher", "Port of the store there."),
    **{v.name: ("a launcher", f"{v.meaning} It chooses the GPU.") for v in environment.LOCAL_RANKS},
    "SLURMD_NODENAME": ("Slurm", "Host of this process; copies of state go to different ones."),
    "LOCAL_WORLD_SIZE": (
        "torchrun",
        "Number of processes of this host; where it is `WORLD_SIZE`, no interface is looked for.",
    ),
    "TORCHELASTIC_USE_AGENT_STORE": ("torchrun", "`True` if torchrun hosts the store itself."),
    "TORCHELASTIC_ERROR_FILE": ("torchrun", "File for an error, which torchrun then prints last."),
    "TORCHELASTIC_RESTART_COUNT": ("torchrun", "Number of earlier starts of the job."),
    "XDG_CACHE_HOME": (
        "the user's caches",
        "Folder of caches of this user, ~/.cache without it.",
    ),
    "GLOO_SOCKET_IFNAME": (
        "gloo",
        "Network interface of the ranks on this host; without it, where its name stands for "
        "loopback, that on the route to rank 0.",
    ),
    "OMP_NUM_THREADS": (
        "torch",
        "Threads of a process on CPU. Ranks that pcomm starts, as by `--ranks`, have a share of "
        "the cores instead.",
    ),
    "ONEDNN_MAX_CPU_ISA": (
        "oneDNN",
        "Most instructions that products on CPU take, such as `AVX2`; it decides bits of results.",
    ),
    "ATEN_CPU_CAPABILITY": ("torch", "The same for its own kernels, such as `avx2`."),
    "CUDA_VISIBLE_DEVICES": ("CUDA", "GPUs that a process sees."),
    "TRITON_INTERPRET": ("Triton", "`1` runs the kernels of pcomm-nvls on CPU, by emulation."),
    "TRITON_CACHE_DIR": ("Triton", "Compiled kernels; `pcomm bench nvls` sets it to time builds."),
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": (
        "torch",
        "`1` lets ranks share a GPU in pcomm-nvls, for tests; there is no multicast then.",
    ),
    "TORCH_DISTRIBUTED_DEBUG": (
        "torch",
        "`DETAIL` is refused by a `Session` on NCCL: torch would end ranks that go on.",
    ),
    "LD_LIBRARY_PATH": ("the loader", "Folders in which `pcomm doctor` looks for other NCCLs."),
    "LD_PRELOAD": ("the loader", "Libraries among which it looks for one."),
}

CONFIGURATION = """\
# Configuration keys

What a TOML file for `pcomm train --config` may hold, and `--set section.key=value` may set: the
values that a key takes, and its default. Another key is an error that names the nearest one.

A number is what it says, 0 included. What is no number has a word: `"auto"` is derived from other
keys, `"all"` is everything there is, `"end"` is once after the last step, and `"none"` is no limit
or no evaluation.
"""

# Words for the kinds of JSON schema, and for the bounds of numbers.
KINDS = {
    "integer": "integer",
    "number": "number",
    "string": "string",
    "boolean": "boolean",
    "array": "list of",
}
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def pages() -> dict[str, str]:
    """Every generated page by its name under docs/."""
    return {
        "reference/environment.md": ENVIRONMENT + environment.table() + _others(),
        "reference/configuration.md": CONFIGURATION + "\n".join(_configuration_lines()) + "\n",
        "reference/works-with.md": works_with_page(),
        **face_pages(),
    }


def _others() -> str:
    rows = [f"- `{name}` ({whose}): {meaning}\n" for name, (whose, meaning) in OTHERS.items()]
    return OTHERS_HEAD + "".join(rows)


def _configuration_lines() -> Iterator[str]:
    schemas = {name: TypeAdapter(cls).json_schema() for name, cls in SECTIONS.items()}
    section = ""
    for key in keys():
        if key.section != section:
            section = key.section
            yield from ["", f"## {section}", ""]
        kind = takes(schemas[key.section]["properties"][key.attribute])
        yield f"- `{key.name}` ({kind}; `{toml_value(key.default)}`): {key.help}"


def takes(schema: Mapping[str, Any]) -> str:
    """The values of a key in words, from the JSON schema that pydantic makes of its type."""
    if "anyOf" in schema:
        return ", or ".join(takes(one) for one in schema["anyOf"])
    choices = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if choices:
        return " or ".join(f"`{toml_value(choice)}`" for choice in choices)
    words = [KINDS[schema["type"]]]
    if schema["type"] == "array":
        items = schema.get("prefixItems") or [schema["items"]]
        count = f"{len(items)} items, each" if "prefixItems" in schema else "items, each"
        words += [count, takes(items[0])]
    bounds = [f"{word} {schema[bound]}" for bound, word in BOUNDS.items() if bound in schema]
    return " ".join([*words, " and ".join(bounds)]).strip()


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text)
    for page in row_tables.PAGES:
        page.write_text(row_tables.filled(page.read_text()))
