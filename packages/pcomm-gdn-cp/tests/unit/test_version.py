from importlib.metadata import version

import pcomm.gdn_cp


def test_version_is_that_of_the_installed_distribution():
    assert pcomm.gdn_cp.__version__ == version("pcomm-gdn-cp")
