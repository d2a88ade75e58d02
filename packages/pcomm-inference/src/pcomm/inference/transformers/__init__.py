"""Models of transformers, unchanged, as models of the engine."""

from pcomm.inference.transformers.adapter import TransformersModel

__all__ = ["TransformersModel"]
