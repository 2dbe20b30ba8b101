"""
The settings of a model, beside its weights, whose loader makes it of them: NeMo's ``model_config.yaml``.

``restore_from`` imports the class under ``target``, and calls what each ``_target_`` names with the settings beside it,
as Hydra does. See nemo/core/classes/common.py, and hydra/_internal/instantiate/_instantiate2.py.

No reader of YAML is needed for that: a mention that is not plainly a key with a name is one that cannot be followed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from ckptool.formats.runnable.surveys import Act
from ckptool.messages import cut
from ckptool.pickles.alarms import reaching
from ckptool.pickles.dangerous_names import CALLED_CLASSES, LOADS, SETTINGS, UNFOLLOWED

_LONGEST: Final = 120
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|\r?\n[ \t]*)")
"""In a string of YAML: a character by its number, or a line that goes on."""
_MENTION: Final = re.compile(r"(?<!\w)_target_(?!\w)|^(?:target|cls)(?=[\"']?[ \t]*:)", re.MULTILINE)
_CALL: Final = re.compile(
    r"[\"']?[ \t]*:[ \t]+(?P<quote>[\"']?)(?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*)+)(?P=quote)[ \t]*(?:[,}#\r\n]|$)"
)
_NOTHING: Final = re.compile(r"[\"']?[ \t]*:[ \t]+(?:null|~)?[ \t]*(?:[,}#\r\n]|$)")
_COMMENT: Final = re.compile(r"^[ \t]*#[^\n]*$", re.MULTILINE)


def of_settings(text: str, record: str) -> Iterator[Act]:
    """Yield what settings have their loader call; what cannot be followed may reach the system."""
    text = _COMMENT.sub("", _ESCAPE.sub(lambda one: chr(int(one[1] or one[2] or "0", 16)).strip("\0"), text))
    for found in _MENTION.finditer(text):
        call = _CALL.match(text, found.end())
        if call is None:
            if _NOTHING.match(text, found.end()) is None:
                rest = cut(" ".join(text[found.start() : found.end() + _LONGEST].split()), _LONGEST)
                yield Act("system", "runs", rest, f"settings with {rest!r}", UNFOLLOWED, record, found.start())
            continue
        name = call["name"]
        why = LOADS if name in CALLED_CLASSES else reaching(name, name.rpartition(".")[2])
        shown = f"settings that call {cut(name, _LONGEST)}(…)"
        yield Act("system" if why else "code", "runs", name, shown, why or SETTINGS, record, found.start())
