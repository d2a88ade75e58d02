"""Language models trained and run on the pcomm packages; import from the modules."""

from importlib.metadata import version

__version__ = version("pcomm-integration")
