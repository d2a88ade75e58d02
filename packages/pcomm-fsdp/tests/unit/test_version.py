from importlib.metadata import version

import pcomm.fsdp


def test_version_is_that_of_the_installed_distribution():
    assert pcomm.fsdp.__version__ == version("pcomm-fsdp")
