"""
What an error message of a loader means, and what to do about it.

A message tells less than the file: every hint ends at a command that looks at that. Lists of missing and unexpected
keys are compared as names of a file and a model are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptool.checking.error_messages import ENTRIES, FRAGMENTS, GENERAL, Explanation
from ckptool.names.matching import match

_MOST_TEXT = 1 << 20
_MOST_NAMES = 10_000
_QUOTED = re.compile(r'"([^"\n]{1,1000})"')
_BARE = re.compile(r"[\w.]{0,1000}\w(?=[\s,;.\]']|$)")
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def explain(text: str) -> tuple[Explanation, ...]:
    """Return what a pasted message means, most specific first; nothing if it is not known."""
    plain = _STYLE.sub("", text[:_MOST_TEXT])
    found = [*_keys(plain), *(one for entry in ENTRIES if (one := entry.apply(plain)) is not None)]
    if not found:
        found = [one for entry in (*GENERAL, *FRAGMENTS) if (one := entry.apply(plain)) is not None][:1]
    first = {one.kind: one for one in reversed(found)}
    return tuple(one for one in found if first[one.kind] is one)


def _keys(text: str) -> Iterator[Explanation]:
    """Explain lists of missing and unexpected keys by what turns the one into the other."""
    missing, unexpected = (_names_behind(text, what) for what in ("Missing key", "Unexpected key"))
    if not missing and not unexpected:
        return
    matched = match(dict.fromkeys(missing, ()), dict.fromkeys(unexpected, ()))
    counts = f"missing from the file: {len(missing):,}; in it and not the model's: {len(unexpected):,}"
    if matched.pairs and matched.changes and not matched.alternatives:
        options = " ".join(word for change in matched.changes for word in change.arguments)
        meaning = f"{counts}; the same under other names: {len(matched.pairs):,}."
        yield Explanation("keys-renamed", meaning, f"Rename them: ckptool migrate FILE --form state_dict {options}")
    elif missing and 0 < len(unexpected) < len(missing) and all("." not in name for name in unexpected):
        meaning = f"{counts}: a whole checkpoint was given, and the weights are deeper in it."
        yield Explanation("keys-nested", meaning, "Take them out: ckptool migrate FILE --form state_dict")
    else:
        hint = "Hold the file against the class: ckptool check FILE --model package.module:Class"
        yield Explanation("keys", f"{counts}.", hint)


def _names_behind(text: str, heading: str) -> list[str]:
    _, found, rest = text.partition(heading)
    if not found:
        return []
    line = re.split(r"\n|\\n|(?:Missing|Unexpected) key|size mismatch", rest, maxsplit=1)[0]
    names = _QUOTED.findall(line) or _BARE.findall(line.partition(":")[2])  # quotes get lost on the way
    return list(dict.fromkeys(names))[:_MOST_NAMES]
