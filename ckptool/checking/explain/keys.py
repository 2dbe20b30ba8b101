"""
One message and its explanation; and lists of missing and unexpected keys in it, and what turns the one into the other.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from ckptool.messages import counted
from ckptool.names.matching import Renames, is_extra_state, match, may_be_missing
from ckptool.names.suggestions import guess_renames
from ckptool.names.wrappers import HEADS
from ckptool.sources.naming import command_line

_MOST_NAMES = 10_000
_QUOTED = re.compile(r""""([^"\n]{1,1000})"|'([^'\n]{1,1000})'""")
_BARE = re.compile(r"(?<![\w./])[\w./]{0,1000}\w(?=[\s,;.\]']|$)")  # not from within a word: each letter would be tried
_END = re.compile(r"\n|\\n|(?:missing|unexpected)[_ ]key|size mismatch", re.IGNORECASE)
_HOLDERS = (
    "state_dict",
    "model_state_dict",
    "model",
    "net",
    "module",
    "weights",
    "params",
    "ema",
    "teacher",
    "network",
)
"""Entries under which the weights of a checkpoint are, most usual first."""
INSPECT = "ckptool inspect FILE"
FIT = "ckptool check FILE --model package.module:Class"
WEIGHTS = "ckptool migrate FILE --form state_dict"


class Explanation(NamedTuple):
    """What a message means. ``kind`` is stable, for programs."""

    kind: str
    meaning: str
    hint: str | None = None
    command: str | None = None
    """The command line that does it. Where no file was given to look into, it has FILE in place of the path."""
    in_file: str | None = None
    """What in the file that was given causes the message; or that nothing in it does."""


class KeyLists(NamedTuple):
    """The names in a message: those that the model lacks in the file, and those that it has no use for."""

    missing: list[str]
    unexpected: list[str]


def key_lists(text: str) -> KeyLists:
    """Return the names that a message lists; none where it is another message."""
    return KeyLists(_names_after(text, r"[Mm]issing[_ ]key"), _names_after(text, r"[Uu]nexpected[_ ]key(?!word)"))


def form_of(text: str) -> str:
    """Return the form that a message about names is about: torch.distributed.checkpoint has words of its own."""
    return "dcp" if re.search("[Mm]issing key in checkpoint", text) else "state_dict"


def names_meet(expected: Collection[str], found: Collection[str], *, every: bool = True) -> Renames | None:
    """
    Return what has to be done to names so that nothing is missing among them; None where it is not known.

    Those that both have may not be among them, unless these are ``every`` name.
    """
    wanted, there = dict.fromkeys(expected, ()), dict.fromkeys(found, ())
    matched = match(wanted, there)
    is_whole = bool(matched.pairs) and all(map(may_be_missing, matched.missing))
    is_for_all = not every and any(change.option == "add_prefix" for change in matched.changes)
    is_seen_through = matched.target_wrapped and matched.changes
    if is_whole and not (matched.alternatives or is_seen_through or is_for_all):
        return matched.changes
    return guess_renames(wanted, there, every=every) or None


def why_renamed(changes: Renames) -> str:
    """Return the hint beside a command that renames: what takes only a wrapper or one prefix off is no guess."""
    is_sure = all(change.option != "rename" for change in changes)
    return "Rename them." if is_sure else "If these are the same tensors, rename them."


def explain_keys(text: str) -> Explanation | None:
    """Explain lists of missing and unexpected keys by what turns the one into the other."""
    missing, unexpected = key_lists(text)
    if not missing and not unexpected:
        return None
    if all(map(is_extra_state, (*missing, *unexpected))):
        return _extra_state(missing, unexpected, form_of(text))
    counts = (
        f"The file lacks {counted(len(missing), 'name')} of the model, and has "
        f"{counted(len(unexpected), 'name')} that the model lacks"
    )
    changes = names_meet(missing, unexpected, every=False)
    if changes:
        words = [word for change in changes for word in change.arguments]
        return Explanation(
            "keys-renamed",
            f"{counts}. A change of names would match {min(len(missing), len(unexpected)):,} of them.",
            why_renamed(changes),
            command_line("FILE", "migrate", *words, form=form_of(text)),
        )
    if missing and _is_checkpoint(missing, unexpected):
        return _nested(unexpected)
    if unexpected and not missing and all(name.partition(".")[0] in HEADS for name in unexpected):
        meaning = f"{counts}. They begin with what a wrapper added, {unexpected[0].partition('.')[0]!r}."
        command = command_line("FILE", "migrate", form="state_dict", strip_wrappers=True)
        return Explanation("keys-renamed", meaning, "Write them without it.", command)
    return Explanation("keys", f"{counts}.", "Compare the file with the class.", FIT)


def _extra_state(missing: list[str], unexpected: list[str], form: str) -> Explanation:
    meaning = (
        f"_extra_state is what TransformerEngine keeps of FP8, and no weight: {len(missing):,} missing, "
        f"{len(unexpected):,} unexpected. A model that does not compute in FP8 needs none."
    )
    if missing:
        partly = "strict=False" if form == "state_dict" else "planner=DefaultLoadPlanner(allow_partial_load=True)"
        return Explanation("extra-state", meaning, f"Load with {partly}: nothing else is missing.", INSPECT)
    glob = "*._extra_state" if all("." in name for name in unexpected) else "*_extra_state"
    return Explanation(
        "extra-state", meaning, "Leave them out.", command_line("FILE", "migrate", form="state_dict", exclude=glob)
    )


def _is_checkpoint(missing: list[str], unexpected: list[str]) -> bool:
    """Say whether what is unexpected are the entries of a checkpoint, and not the names of tensors."""
    if not unexpected or any("." in name for name in unexpected):
        return False
    usual = any(name in _HOLDERS or re.search("state_dict|optim|epoch|step|iteration", name) for name in unexpected)
    return usual or len(unexpected) < len(missing)


def _nested(unexpected: list[str]) -> Explanation:
    named = [name for name in _HOLDERS if name in unexpected]
    named += [name for name in unexpected if "state_dict" in name and not re.search("optim|sched|scaler", name)]
    if not named:
        meaning = "load_state_dict() was given a whole checkpoint: the weights are deeper in it."
        return Explanation("keys-nested", meaning, "Give it the entry that holds them, or write them alone.", WEIGHTS)
    others = ", ".join(repr(name) for name in unexpected[:4] if name != named[0])
    meaning = (
        f"load_state_dict() was given a whole checkpoint: the weights are its entry {named[0]!r}"
        f"{f', beside {others}' if others else ''}."
    )
    hint = f"Call model.load_state_dict(checkpoint[{named[0]!r}]), or write the weights alone."
    return Explanation("keys-nested", meaning, hint, WEIGHTS)


def _names_after(text: str, heading: str) -> list[str]:
    begin = re.search(heading, text)
    if begin is None:
        return []
    line = _END.split(text[begin.end() :], maxsplit=1)[0]
    names = [double or single for double, single in _QUOTED.findall(line)]
    return list(dict.fromkeys(names or _BARE.findall(line.partition(":")[2])))[:_MOST_NAMES]  # quotes get lost
