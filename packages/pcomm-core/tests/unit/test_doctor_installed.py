"""Checks of the doctor that other packages bring by entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from pcomm.core.doctor import command as examination
from pcomm.core.doctor.command import GROUP, examine, installed_checks


def test_checks_of_other_packages_run_once_each_and_one_that_is_missing_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [
        EntryPoint("nvls", "pcomm.core.doctor.checks:check_process", GROUP),
        EntryPoint("nvls", "pcomm.core.doctor.checks:check_process", GROUP),
        EntryPoint("absent", "pcomm.core.doctor.nowhere:check", GROUP),
        EntryPoint("odd", "pcomm.core.doctor.checks:_MIB", GROUP),
        EntryPoint("nvls", "pcomm.core.doctor.checks:check_open_files", "another group"),
    ]
    monkeypatch.setattr(
        examination, "entry_points", lambda group: EntryPoints(found).select(group=group)
    )
    report = examine(checks=installed_checks())
    names = [finding.name for finding in report.findings]
    assert names == ["absent", "python", "platform", "cores", "memory", "odd"]
    assert "ModuleNotFoundError" in report.named("absent").reason
    assert "uninstall" in report.named("absent").fix
    assert "not callable" in report.named("odd").reason
    found.clear()
    assert installed_checks() == []
