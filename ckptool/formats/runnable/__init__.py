"""What in a file could run: pickles and programs, in whatever holds them. They are read as data, and graded."""

from typing import Final

SETTINGS: Final = "model_config.yaml"
"""What NeMo makes a model of: see ``settings``."""
