"""Nonuniform tensor parallelism; nothing but the version is here yet."""

from importlib.metadata import version

__version__ = version("pcomm-ntp")
