"""Hides the ``/proc`` and ``/sys`` of the system beneath Wine, as no Windows has them, and what Wine lacks."""

import _winapi
import builtins
import io
import os
from functools import wraps


def _hidden(path):
    try:
        text = os.fspath(path)
    except TypeError:  # a descriptor
        return False
    text = os.fsdecode(text).replace("\\", "/")
    return text in ("/proc", "/sys") or text.startswith(("/proc/", "/sys/"))


def _hiding(function, absent):
    @wraps(function)
    def call(path, *rest, **options):
        return absent(path) if _hidden(path) else function(path, *rest, **options)

    return call


def _refuse(path):
    raise FileNotFoundError(2, "No such file or directory", path)


for _name in ("open", "stat", "lstat", "listdir", "scandir", "readlink"):
    setattr(os, _name, _hiding(getattr(os, _name), _refuse))
os.access = _hiding(os.access, lambda path: False)
for _name in ("exists", "isfile", "isdir", "lexists"):
    setattr(os.path, _name, _hiding(getattr(os.path, _name), lambda path: False))
builtins.open = io.open = _hiding(open, _refuse)

del _winapi.CopyFile2  # with which `shutil` copies; Wine 8 ends a process that calls it
