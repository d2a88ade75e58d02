from importlib.metadata import version

import pcomm.inference


def test_version_is_that_of_the_installed_distribution():
    assert pcomm.inference.__version__ == version("pcomm-inference")
