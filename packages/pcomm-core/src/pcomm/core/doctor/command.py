"""`pcomm doctor`: prints the report, and fails if something is broken."""

from __future__ import annotations

import argparse
import json
import os
import sys

from pcomm.core.doctor.examination import CHECKS, examine, installed_checks
from pcomm.core.doctor.report import Report
from pcomm.core.doctor.self_test import check_all_reduce, check_job
from pcomm.core.doctor.this_machine import ThisMachine

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
            help="do not start the two local ranks that add two numbers, nor have those of a "
            "launcher meet",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the report; 1 if something is broken, else 0.

        Under a launcher the ranks of the job meet: rank 0 prints its report with what they found
        together, and all return the same.
        """
        size = os.environ.get("WORLD_SIZE", "")
        is_job = size.isdecimal() and int(size) > 1
        skipped = {check_all_reduce} if arguments.no_self_test or is_job else set()
        checks = [check for check in CHECKS if check not in skipped]
        report = examine(checks=[*checks, *installed_checks()])
        if is_job and not arguments.no_self_test:
            together = check_job(ThisMachine(), report)
            report = Report((*report.findings, *together))
            if os.environ.get("RANK") != "0":
                if together[0].name == "job.ranks":
                    # Rank 0 may be the one that is missing.
                    print(Report(tuple(together)).as_text(), file=sys.stderr)
                return 0 if report.is_healthy else 1
        print(json.dumps(report.as_dict(), indent=2) if arguments.json else report.as_text())
        return 0 if report.is_healthy else 1


command = DoctorCommand()
