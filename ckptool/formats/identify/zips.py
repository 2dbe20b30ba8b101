"""What a zip is that holds no checkpoint, told by the names of its members, one row each."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckptool.errors import NotACheckpoint
from ckptool.formats.identify.head import EXPORTED, IN_TENSORFLOW, UNPACK, listed, not_a_checkpoint
from ckptool.messages import counted, quoted
from ckptool.sources.paths import is_likely

_NAMES_LOOKED_AT = 10_000
_TORCH_MEMBER = re.compile(
    r"(?:[^/]+/)?(?:(?:data|constants|attributes)\.pkl|archive_format|serialized_exported_program\.json"
    r"|\.data/extern_modules)|[^/]+/model\.json"
)
_ROWS = tuple(
    (re.compile(pattern, re.DOTALL), kind, what, hint)
    for pattern, kind, what, hint in (
        (r"(?:.*/)?Data/com\.apple\.CoreML/.*", "coreml", "a Core ML package", EXPORTED),
        (r"(?:.*/)?model\.weights\.h5", "keras", "a Keras model", "Read it with Keras."),
        (r"(?:.*/)?saved_model\.pb", "tensorflow", "a TensorFlow SavedModel", IN_TENSORFLOW),
        (r"MAR-INF/MANIFEST\.json", "mar", "a TorchServe model archive", UNPACK),
        (r"(?:word|xl|ppt)/.*\.xml", "office", "a Microsoft Office document", None),
        (r"content\.xml", "office", "an OpenDocument file", None),
        (r"[^/]+\.dist-info/WHEEL", "wheel", "a Python wheel", "Install it with pip."),
        (r"META-INF/MANIFEST\.MF", "jar", "a Java or Android archive", None),
    )
)


def name_foreign_zip(names: Sequence[str]) -> NotACheckpoint | None:
    """
    Say what a zip is from the names of its members, or return None if they are laid out as torch does.

    A zip of no particular kind is an ``archive``, and the hint names the members that look like weights.
    """
    some = names[:_NAMES_LOOKED_AT]
    if any(_TORCH_MEMBER.fullmatch(name) for name in some):
        return None
    files = [name for name in names if not name.endswith("/") and not name.startswith("__MACOSX/")]
    if not files:
        return not_a_checkpoint("a zip archive without files", "archive")
    number = len(files)
    if all(name.endswith(".npy") for name in files):
        arrays = listed([name[: -len(".npy")] for name in files])
        what = f"a numpy .npz archive of {counted(number, 'array')}: {arrays}"
        return not_a_checkpoint(what, "npz", "Read it with numpy.load.")
    for pattern, kind, what, hint in _ROWS:
        if any(pattern.fullmatch(name) for name in some):
            return not_a_checkpoint(f"{what}, a zip of {counted(number, 'file')}", kind, hint)
    what = f"a zip archive of {counted(number, 'file')}: {listed(files)}"
    return not_a_checkpoint(what, "archive", _to_open(files))


def _to_open(files: Sequence[str]) -> str | None:
    weights = [name for name in files if is_likely(name)]
    if not weights:
        return None
    if len(weights) == 1:
        return f"Unpack it and open {quoted(weights[0])}."
    return f"Unpack it and open one of {listed(weights, 8)}."
