"""Write the pages of the documentation that list what the code declares and what was measured.

    python tools/reference_pages.py

It also fills the marked tables of other pages, READMEs among them, with committed rows. Tests
compare the committed pages with what this would write.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter

import benchmark_page
import row_tables
from face_pages import face_pages
from pcomm.core.process import environment
from pcomm.integration.config import SECTIONS, keys
from pcomm.integration.config_errors import toml_value
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

A number is what it says, 0 included. What is no number has a word: `"auto"` is derived from other
keys, `"all"` is everything there is, `"end"` is once after the last step, and `"none"` is no limit
or no evaluation.
"""

# Words for the kinds of JSON schema, and for the bounds of numbers.
KINDS = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "array": "a list of",
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
        "reference/environment.md": ENVIRONMENT + environment.table(),
        "reference/configuration.md": CONFIGURATION + "\n".join(_configuration_lines()) + "\n",
        **face_pages(),
        "benchmarks/index.md": benchmark_page.text(benchmark_page.row_files(DOCS / "benchmarks")),
    }


def _configuration_lines() -> Iterator[str]:
    schemas = {name: TypeAdapter(cls).json_schema() for name, cls in SECTIONS.items()}
    section = ""
    for key in keys():
        if key.section != section:
            section = key.section
            yield from ["", f"## {section}", ""]
            yield from ["| key | takes | default | meaning |", "|---|---|---|---|"]
        kind = takes(schemas[key.section]["properties"][key.attribute])
        yield f"| `{key.name}` | {kind} | `{toml_value(key.default)}` | {key.help} |"


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
