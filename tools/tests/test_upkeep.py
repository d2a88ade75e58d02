"""What looks after the repository from outside of nox agrees with it."""

import re
import tarfile
import zipfile
from types import SimpleNamespace

import pytest
import yaml

import check_metadata
import pcomm.core
from repository import ROOT
from site_hooks import on_config


def test_pre_commit_has_the_ruff_of_the_constraints():
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (pinned,) = re.findall(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert hooks["rev"] == f"v{pinned}"
    assert [hook["id"] for hook in hooks["hooks"]] == ["ruff-check", "ruff-format"]


def test_an_issue_cannot_be_filed_without_the_report_of_the_doctor():
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    fields = {one["attributes"]["label"]: one for one in form["body"]}
    assert fields["Output of `pcomm doctor --json`"]["validations"] == {"required": True}


def test_the_site_tells_its_version_and_uses_no_host_but_its_own():
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "\nhooks: [tools/site_hooks.py]\n" in settings
    assert "\n  font: false\n" in settings
    named = on_config(SimpleNamespace(site_name="pcomm"))
    assert named.site_name == f"pcomm {pcomm.core.__version__}"


METADATA = """\
Metadata-Version: 2.4
Name: pcomm-one
Version: 0.1.0
Summary: One.
License-Expression: Apache-2.0
License-File: LICENSE
Classifier: Typing :: Typed
Requires-Python: >=3.11
Description-Content-Type: text/markdown

# One
"""


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        ("", "", ""),
        ("Apache-2.0", "Apache 2", "license-expression"),
        ("Requires-Python: >=3.11\n", "", "requires-python is missing"),
        ("Requires-Python: >=3.11", "Requires-Python: 3.11 or so", "requires-python"),
        ("text/markdown", "text/plain", "a description in Markdown is missing"),
        ("Classifier: Typing :: Typed\n", "", "Typing :: Typed is missing"),
    ],
)
def test_metadata_that_an_index_refuses_are_found(old, new, wrong, tmp_path):
    text = METADATA.replace(old, new).encode()
    with zipfile.ZipFile(tmp_path / "pcomm_one-0.1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pcomm_one-0.1.0.dist-info/METADATA", text)
    inside = tmp_path / "PKG-INFO"
    inside.write_bytes(text)
    with tarfile.open(tmp_path / "pcomm_one-0.1.0.tar.gz", "w:gz") as source:
        source.add(inside, "pcomm_one-0.1.0/PKG-INFO")
    inside.unlink()
    found = "".join(check_metadata.complaints(tmp_path))
    assert wrong in found
    assert bool(wrong) == bool(found)
    (tmp_path / "pcomm_one-0.1.0.tar.gz").unlink()
    assert "not a pair" in "".join(check_metadata.complaints(tmp_path))
