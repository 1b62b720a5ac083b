"""Models in the form of transformers: import_hf, export_hf."""

from checkpoints.hf.exporting import export_hf
from checkpoints.hf.importing import import_hf

__all__ = ["export_hf", "import_hf"]
