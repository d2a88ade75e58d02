"""Write the pages of the documentation that list what the code declares and what was measured.

    python tools/reference_pages.py

It also fills the marked tables of other pages, READMEs among them, with committed rows. Tests
compare the committed pages with what this would write.
"""

from collections.abc import Iterator

import benchmark_page
import row_tables
from face_pages import face_pages
from pcomm.core.process import environment
from pcomm.integration.config import keys
from pcomm.integration.config_values import expected_type, toml_value
from repository import ROOT

DOCS = ROOT / "docs"

ENVIRONMENT = """\
# Environment variables

Every variable that pcomm reads. A value that cannot be read is an error, and so is a variable
with the prefix `PCOMM_` that is not in this table.

"""

CONFIGURATION = """\
# Configuration keys

What a TOML file for `pcomm train --config` may hold, and what `--set section.key=value` may set. A
key that is not here is an error that names the nearest one.
"""


def pages() -> dict[str, str]:
    """Every generated page by its name under docs/."""
    return {
        "reference/environment.md": ENVIRONMENT + environment.table(),
        "reference/configuration.md": CONFIGURATION + "\n".join(_configuration_lines()) + "\n",
        **face_pages(),
        "benchmarks/index.md": benchmark_page.text(sorted((DOCS / "benchmarks").glob("*.csv"))),
    }


def _configuration_lines() -> Iterator[str]:
    section = ""
    for key in keys():
        if key.section != section:
            section = key.section
            yield from ["", f"## {section}", ""]
            yield from ["| key | takes | default | meaning |", "|---|---|---|---|"]
        takes, default = expected_type(key.annotation), toml_value(key.default)
        yield f"| `{key.name}` | {takes} | `{default}` | {key.help} |"


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text)
    for page in row_tables.PAGES:
        page.write_text(row_tables.filled(page.read_text()))
