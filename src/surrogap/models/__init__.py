"""Models by name: the paper's twelve, small ones for small images, and all of timm's."""

from surrogap.models.registry import create, names

__all__ = ["create", "names"]
