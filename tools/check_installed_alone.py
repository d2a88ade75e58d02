"""Check that modules come from installed wheels, and that unrequested siblings are absent.

    python -P tools/check_installed_alone.py pcomm.nvls pcomm.core --absent pcomm.fsdp pcomm.ntp

`nox -s isolated` runs it in the environment where one package was installed alone: it keeps a test
run honest that would otherwise pass on the sources of the checkout, or on a sibling left behind.
"""

import argparse
import importlib
import importlib.util
import sys
import sysconfig
from pathlib import Path


def complaints(present: list[str], absent: list[str]) -> list[str]:
    """What is wrong with this environment, a sentence each; empty when all is as it should be."""
    site_packages = Path(sysconfig.get_path("purelib")).resolve()
    found = []
    for name in present:
        file = Path(str(importlib.import_module(name).__file__)).resolve()
        if not file.is_relative_to(site_packages):
            found.append(f"{name} was imported from {file}, not from {site_packages}.")
    for name in absent:
        spec = importlib.util.find_spec(name)
        if spec is not None:
            found.append(f"{name} can be imported from {spec.origin}, though nothing asked for it.")
    return found


def main(words: list[str]) -> int:
    """Print the complaints; the exit status says whether there were any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("present", nargs="+", help="modules that must come from site-packages")
    parser.add_argument("--absent", nargs="*", default=[], help="modules that must not be there")
    options = parser.parse_args(words)
    found = complaints(options.present, options.absent)
    print("\n".join(found) or f"{', '.join(options.present)}: from the wheel, and alone")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
