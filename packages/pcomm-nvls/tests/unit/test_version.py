from importlib.metadata import version

import pcomm.nvls


def test_version_is_that_of_the_installed_distribution():
    assert pcomm.nvls.__version__ == version("pcomm-nvls")
