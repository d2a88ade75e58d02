from importlib.metadata import version

import pcomm.ntp


def test_version_is_that_of_the_installed_distribution():
    assert pcomm.ntp.__version__ == version("pcomm-ntp")
