"""What computes with torch or numpy; ``needed`` imports what an installation may lack, or says how to get it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ckptool.errors import MissingPackage


def needed(module: str = "torch", package: str = "torch", requirement: str = '"ckptool[torch]"') -> Any:
    """
    Import a module, and return it. ``requirement`` is what pip is to install.

    Raises:
        MissingPackage: Its package is not installed, or is but cannot be imported; the message says which.
    """
    try:
        return import_module(module)
    except Exception as error:  # a package may raise anything while it is imported
        if isinstance(error, ModuleNotFoundError) and error.name in (module, module.partition(".")[0]):
            raise MissingPackage.named(package, f"pip install {requirement}") from error
        reason = ": ".join(filter(None, (type(error).__name__, str(error).strip().partition("\n")[0])))
        broken = MissingPackage(
            f"{package} is installed, but cannot be imported: {reason}",
            kind="broken-package",
            hint=f'Run python -c "import {module}" to see all that it says.',
        )
        broken.package = package
        raise broken from error


def check_installed() -> None:
    """Raise MissingPackage unless torch is installed, without importing it: before work that needs it only later."""
    if find_spec("torch") is None:
        raise MissingPackage.named("torch", 'pip install "ckptool[torch]"')
