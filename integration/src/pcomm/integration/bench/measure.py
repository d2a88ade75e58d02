"""The parts of a run, one after the other."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from pcomm.integration.bench.contexts import measure_contexts
from pcomm.integration.bench.directories import Directories
from pcomm.integration.bench.long_prompt import measure_prompt
from pcomm.integration.bench.prefixes import measure_prefix
from pcomm.integration.bench.rows import Found
from pcomm.integration.bench.server import check_server, measure_server
from pcomm.integration.bench.settings import Settings
from pcomm.integration.bench.streams import measure_streams
from pcomm.integration.bench.theirs import check_transformers
from pcomm.integration.bench.tiny import measure_tiny

__all__ = ["measure"]


def measure(settings: Settings) -> list[Found]:
    """Measure the parts that were asked for; their models lie in a temporary folder. Local.

    Args:
        settings: Parts, models and lengths.

    Raises:
        UnsupportedError: transformers is not installed, or what the server stands on.
    """
    check_transformers("serving")
    if "server" in settings.parts:
        check_server()
    with tempfile.TemporaryDirectory(prefix="pcomm-bench-") as folder:
        return [found for part in settings.parts for found in _part(part, settings, Path(folder))]


def _part(part: str, settings: Settings, folder: Path) -> list[Found]:
    # It takes minutes, and results go to stdout.
    print(f"{part} ...", file=sys.stderr, flush=True)
    directories = Directories(folder)

    def large() -> Path:
        return settings.model or directories.of(settings.models.large, settings.dtype)

    parts: Mapping[str, Callable[[], list[Found]]] = {
        "streams": lambda: [measure_streams(settings, large())],
        "tiny": lambda: [measure_tiny(settings, directories.of(settings.models.tiny))],
        "context": lambda: [measure_contexts(settings, directories)],
        "prefix": lambda: [
            measure_prefix(settings, shape, directories.of(shape))
            for shape in (settings.models.gpt, settings.models.hybrid)
        ],
        "prompt": lambda: [measure_prompt(settings, large())],
        "server": lambda: [measure_server(settings, directories.of(settings.models.gpt))],
    }
    return parts[part]()
