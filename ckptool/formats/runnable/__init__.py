"""What in a file could run: pickles and programs, in whatever holds them. They are read as data, and graded."""

from typing import Final

SETTINGS: Final = "model_config.yaml"
"""What NeMo makes a model of: see ``settings``."""

_ENDS: Final = (".py", "bytecode.pkl", ".json", ".data/extern_modules", "archive_format", SETTINGS)
"""How names of members end where there may be programs;"""
_FOLDERS: Final = ("/models/", "/aotinductor/")
"""what is in the names of others that are some, in what remains of an exported one."""


def may_be_program(name: str) -> bool:
    """Say whether there may be programs in an archive that has a member of this name."""
    lowered = name.lower()
    return lowered.endswith(_ENDS) or any(folder in lowered for folder in _FOLDERS)
