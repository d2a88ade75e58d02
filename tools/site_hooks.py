"""What mkdocs does with the site beyond its settings: the version, and READMEs as pages.

A page that includes a README has its links, which lead from the README's folder. Needs mkdocs to
run it, and imports none of it.
"""

import os
import re
from pathlib import Path
from typing import Any

from repository import ROOT, project

_README = re.compile(r'^--8<-- "(.+README\.md)"$', flags=re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(\.[^)#\s]*)")


def on_config(config: Any) -> Any:
    """Put the version of the core, which all packages are released with, into the name."""
    config.site_name = f"{config.site_name} {project(ROOT / 'packages' / 'pcomm-core')['version']}"
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put READMEs in place of the lines that name them."""
    folder = Path(page.file.abs_src_path).parent
    return _README.sub(lambda found: with_links_from(ROOT / found[1], folder), markdown)


def with_links_from(readme: Path, folder: Path) -> str:
    """The text of a README, with its relative links as they lead from a folder of the pages."""

    def moved(link: re.Match[str]) -> str:
        return os.path.relpath(readme.parent / link[0], folder)

    return _LINK.sub(moved, readme.read_text())
