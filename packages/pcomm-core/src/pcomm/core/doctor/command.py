"""`pcomm doctor`: prints the report, and fails if something is broken."""

from __future__ import annotations

import argparse
import json

from pcomm.core.doctor.examination import CHECKS, examine, installed_checks
from pcomm.core.doctor.self_test import check_all_reduce

__all__ = ["DoctorCommand", "command"]


class DoctorCommand:
    """See `pcomm.core.command.subcommands.Command`."""

    name = "doctor"
    help = "what this machine can do for pcomm, and why not"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument(
            "--no-self-test",
            action="store_true",
            help="do not start the two local ranks that add two numbers",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the report; 1 if something is broken, else 0."""
        skipped = {check_all_reduce} if arguments.no_self_test else set()
        checks = [check for check in CHECKS if check not in skipped]
        report = examine(checks=[*checks, *installed_checks()])
        print(json.dumps(report.as_dict(), indent=2) if arguments.json else report.as_text())
        return 0 if report.is_healthy else 1


command = DoctorCommand()
