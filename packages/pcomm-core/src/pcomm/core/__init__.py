"""Process groups, layouts, exchanges and collectives for PyTorch; import from the modules."""

from importlib.metadata import version

__version__ = version("pcomm-core")
