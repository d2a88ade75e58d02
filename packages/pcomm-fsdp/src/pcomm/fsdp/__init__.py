"""Fully sharded data parallel with a communicator per collective."""

from importlib.metadata import version

__version__ = version("pcomm-fsdp")
