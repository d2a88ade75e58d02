"""Context parallelism for Gated DeltaNet and relatives; nothing but the version is here yet."""

from importlib.metadata import version

__version__ = version("pcomm-gdn-cp")
