"""How devices are written: those of torch's own are known without it."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Final

from ckptool.errors import MigrationRefused, MissingPackage
from ckptool.torch_ops.needed import needed

_DEVICE: Final = re.compile(r"\s*([A-Za-z]*):?\s*(\d{0,9})\s*")
_LAST: Final = 127  # torch counts them in eight bits
_KINDS: Final = ("cpu", "cuda", "hpu", "ipu", "meta", "mlu", "mps", "mtia", "npu", "privateuseone", "xla", "xpu")
_OTHER: Final = re.compile(r"([A-Za-z_]\w*)(?::(0|[1-9]\d{0,8}))?")


def device_tag(text: str) -> str:
    """
    Return a device as torch writes it, ``cuda:0`` for ``CUDA:0``; that of an extension as it is called in torch here.

    Raises:
        MigrationRefused: It is not one; the hint says what may have been meant, or which there are.
    """
    meant = device_meant(text)
    if meant == text.lower():
        return meant
    other = _OTHER.fullmatch(text)
    if meant:
        hint = f"Did you mean {meant!r}?"
    elif text.partition(":")[0].lower() in _KINDS:
        hint = f"Devices of a kind are numbered from 0 to {_LAST}, as in 'cuda:0'."
    elif other:
        here, which = _of_extension()
        if other[1] == here and int(other[2] or 0) <= _LAST:
            return text
        hint = f"Devices are {', '.join(_KINDS)}, with a number as in 'cuda:0'; {which}."
    else:
        hint = "Devices are written like 'cpu' or 'cuda:0'."
    raise MigrationRefused(f"not a device: {text!r}", kind="not-a-device", hint=hint)


def device_there(text: str) -> str:
    """
    Return a device of another machine, which may have an extension of torch that adds it.

    Raises:
        MigrationRefused: It is not one, or reads like a misspelt one of torch's own.
    """
    kind = text.partition(":")[0]
    if _OTHER.fullmatch(text) and not get_close_matches(kind.lower(), (*_KINDS, "gpu")):
        return text
    return device_tag(text)


def device_meant(text: str) -> str | None:
    """Return the device of torch's own that a text means, or None."""
    match = _DEVICE.fullmatch(text)
    kind, number = (match[1].lower(), match[2]) if match else ("", "")
    kind = "cuda" if kind == "gpu" else kind
    if kind not in _KINDS or int(number or 0) > _LAST:
        return None
    return f"{kind}:{int(number)}" if number and kind not in ("cpu", "meta") else kind


def _of_extension() -> tuple[str | None, str]:
    """Return what an extension of torch calls its device here, and a clause that says so. Importing torch loads it."""
    try:
        needed()
    except MissingPackage:
        return None, "what extensions of torch add is known only where torch is"
    from ckptool.torch_ops.accelerators import of_extension

    name = of_extension()
    return name, f"an extension of torch here adds {name}" if name else "no extension of torch here adds another"
