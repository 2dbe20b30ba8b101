"""One message and its explanation: how to recognise it, what it means, and what to do."""

from __future__ import annotations

import re
from typing import NamedTuple


class Explanation(NamedTuple):
    """What a message means. ``kind`` is stable, for programs."""

    kind: str
    meaning: str
    hint: str | None = None
    command: str | None = None
    """The command line that does it. Where no file was given to look into, it has FILE in place of the path."""
    in_file: str | None = None
    """What in the file that was given causes the message; or that nothing in it does."""


class Entry(NamedTuple):
    """A message: how to recognise it, and its explanation, in which {0}, {1}… are the groups of the pattern."""

    kind: str
    pattern: str
    meaning: str
    hint: str | None = None
    command: str | None = None
    beside: str = ""
    """What the text must hold, too: another pattern."""

    def apply(self, text: str) -> Explanation | None:
        """Return the explanation, if the text holds this message."""
        found = re.search(self.pattern, text)
        if found is None or not re.search(self.beside, text):
            return None
        groups = [(group or "")[:200] for group in found.groups()]
        return Explanation(
            self.kind, self.meaning.format(*groups), self.hint and self.hint.format(*groups), self.command
        )


INSPECT = "ckptool inspect FILE"
CHECK = "ckptool check FILE"
FIT = "ckptool check FILE --model package.module:Class"
WEIGHTS = "ckptool migrate FILE --form state_dict"
TO_CPU = "ckptool migrate FILE --to cpu"
SAFETENSORS = "ckptool migrate FILE OUT.safetensors"
DEVICES = "ckptool devices"
