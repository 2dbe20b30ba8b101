"""
``explain``: what an error message means, what to do, and what in a file is the cause.

A message says less than the file: every hint has a command that inspects the file, and if a file is given, ``in_file``
finds what in it causes the message. Lists of missing and unexpected keys in messages are parsed, and compared: which
renaming makes them meet?
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from configparser import ConfigParser
from functools import cache
from itertools import chain, islice, product
from operator import eq
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from ckptool.arguments import checked
from ckptool.checking.finding import CODES
from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import CkptoolError
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.messages import counted
from ckptool.names.matching import Renames, is_extra_state, match, may_be_missing, renamed
from ckptool.names.suggestions import guess_renames
from ckptool.names.wrappers import HEADS
from ckptool.sources.files import packaged
from ckptool.sources.paths import command_line

__all__ = ["Explanation", "explain"]

_MOST_TEXT = 1 << 20
INSPECT = "ckptool inspect FILE"
_OF_LISTS = frozenset(["load-report", "missing-tensors", "adapter-keys", "lora-layers", "left-over"])
"""Kinds of messages that add nothing to the lists of names in them, if these could be parsed."""
_STYLE = re.compile(r"\x1b\[[0-9;]*m|\r(?=\n)")
_ESCAPED = re.compile(r"\\([nt\"'\\])")
_WITHIN_LIST = re.compile(r"""(?<=['"],)\n|(?<=['"], )\n|(?<=['"])\n(?=, ?['"])""")
_WITHIN_NAME = re.compile(r"""((?:[,:\[] ?['"]|['"](?=[\w.]))[\w.]{0,200})\n(?=[\w.]{0,200}['"])""")
_IS_ESCAPED = re.compile(r"""\\n(?!')|\\["']""")
"""Signs that a text was quoted, as in logs of JSON; torch writes '\\n' of a file that begins with a line break."""


@checked()
def explain(
    text: str, origin: str | PathLike[str] | None = None, *, limits: Limits = DEFAULT_LIMITS
) -> tuple[Explanation, ...]:
    """
    Return what a pasted message means, most specific first; nothing if it is not known.

    With ``origin``, the checkpoint that the message is about, each says what in it causes the message.

    Raises:
        FileUnavailable: There is no such file, or it may not be read.
    """
    plain = _STYLE.sub("", text[:_MOST_TEXT])
    if _IS_ESCAPED.search(plain):
        plain = _ESCAPED.sub(lambda one: {"n": "\n", "t": "\t"}.get(one[1], one[1]), plain)
    plain = _WITHIN_NAME.sub(r"\1", _WITHIN_LIST.sub("", plain))  # each list of names on one line
    found = _explained(plain) or tuple(_own(plain))
    if origin is None:
        return found
    from ckptool.checking.explain.in_file import look_into

    return look_into(found, plain, origin, limits)


class Entry(NamedTuple):
    """A row of ``messages.ini``, which says what each field is."""

    kind: str
    pattern: str
    meaning: str
    do: str = f"See what is in it. $ {INSPECT}"
    beside: str = ""
    otherwise: str = ""
    part: str = ""

    def apply(self, text: str) -> Explanation | None:
        """Return the explanation if the text contains this message; else None."""
        found = re.search(self.pattern, text)
        if found is None or not re.search(self.beside, text):
            return None
        groups = [(group or "")[:200] for group in found.groups()]
        hint, _, command = self.do.partition(" $ ")
        return Explanation(self.kind, self.meaning.format(*groups), hint.format(*groups), command or None)


@cache
def entries() -> tuple[Entry, ...]:
    """Return the table of messages, in its order."""
    table = ConfigParser(interpolation=None, delimiters=("=",))
    table.read_string(packaged(Path(__file__).with_name("messages.ini")))
    return tuple(
        Entry(name.partition(" ")[0], **{field: value.replace("\n", " ") for field, value in table[name].items()})
        for name in table.sections()
    )


def _explained(text: str) -> tuple[Explanation, ...]:
    found: list[Explanation] = []
    # Terminals break lines anywhere, and editors between words: then only the joined text contains the message.
    for one in dict.fromkeys((text, text.replace("\n", ""), text.replace("\n", " "))):
        keys, found = explain_keys(one), list(_applied(one, is_otherwise=False))
        if keys is not None and (keys.kind != "keys" or not found):  # the least specific kind
            found = [keys, *(other for other in found if other.kind not in _OF_LISTS)]
        if found:
            break
    found = found or list(islice(_applied(text, is_otherwise=True), 1))  # general ones, if there is no other
    first = {one.kind: one for one in reversed(found)}
    return tuple(one for one in found if first[one.kind] is one)


def _own(text: str) -> Iterator[Explanation]:
    """Yield explanations of the codes of findings, and of ckptool's own errors, in a text."""
    for code in dict.fromkeys(re.findall(r"\bCK\d{3}\b", text)):
        if code in CODES:
            hint = "docs/check.md lists all codes. See where it is in a file."
            yield Explanation(code, CODES[code].says, hint, "ckptool check FILE")
    every: list[type[CkptoolError]] = [CkptoolError]
    for one in every:
        every += one.__subclasses__()
    for name in dict.fromkeys(re.findall(r"\b([A-Z][a-z]+[A-Z]\w+): ", text)):
        error = next((one for one in every if one.__name__ == name), None)
        if error is not None:
            says = " ".join((error.__doc__ or "").split("\n\n")[0].split())
            yield Explanation(error.default_kind, f"ckptool's own {name}. {says}", OWN, "ckptool check FILE")
    if "not reloaded: " in text:
        fact = "A LiveModel goes on with the weights that it has: what follows is wrong with those that came."
        yield Explanation("not-reloaded", fact, OWN, "ckptool check FILE")


def _applied(text: str, *, is_otherwise: bool) -> Iterator[Explanation]:
    return filter(None, (entry.apply(text) for entry in entries() if bool(entry.otherwise) is is_otherwise))


MOST_NAMES = 10_000
_QUOTED = re.compile(r""""([^"\n]{1,1000})"|'([^'\n]{1,1000})'""")
_BARE = re.compile(r"(?<![\w./])[\w./]{0,1000}\w(?=[\s,;.\]']|$)")  # not from within a word: each letter would be tried
_MISSING = re.compile(
    r"[Mm]issing[_ ](?:adapter |VAE )?key|newly initialized:|not initialized from checkpoint|keys are missing"
    r"|missing:? (?=[\[{])|not found in the checkpoint"
)
_UNEXPECTED = re.compile(
    r"[Uu]nexpected[_ ]key(?!word)|not used when initializing|[Ll]eft ?over (?:VAE )?keys|unexpected:? (?=[\[{])"
    r"|lora key not loaded|keys that are not used by the model"
)
"""Texts before lists of names: those of torch, transformers, diffusers, peft, vLLM and ComfyUI."""
_LINES = re.compile(
    r"(not found in the checkpoint|not used by the model):\n((?:[ \t]*[\w.]+(?:\{[\w., ]+\})?[ \t]*(?:\n|\Z))+)"
)
"""A list with one name a line, as fvcore and detectron2 print it."""
_NO_COLON = re.compile(r"(keys are missing|lora key not loaded):?\s+")
_LIST = re.compile(r"""[^\n'"\[{]{0,200}[\[{]""")
_CLOSED = re.compile(r"[\]}]")
_END = re.compile(r"\n|\\n|(?:missing|unexpected)[_ ]key|size mismatch", re.IGNORECASE)
_ROW = re.compile(r"^[ \t]*(\S(?:[^|\n]{0,1000}\S)?)[ \t]*\|[ \t]*(MISSING|UNEXPECTED|MISMATCH)\b", re.MULTILINE)
"""A row of the table that transformers prints since version 5."""
_MISFIT = re.compile(r"(?:size mismatch for |because (?=\S+ expected shape))([\w.]+)")
_BRACES = re.compile(r"\{(?:(\d{1,4})\.\.\.(\d{1,4})|([\w.]{1,99}(?:, ?[\w.]{1,99}){1,999}))\}")
_OF_ADAPTER = re.compile(r"(?<=\.)((?:lora|hada|lokr)_\w+)\.[^.]+(?=\.weight$|$)")
"""``lora_A.default`` in names of a model with an adapter of peft: the adapter's name, ``default``, is not in files."""
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
"""Names of the entry that holds the weights of a checkpoint, most usual first."""
OWN = "The error has the next step in its attributes .hint and .command, which ckptool prints as Hint: and Run:."
"""The hint for messages of ckptool itself."""
FIT = "ckptool check FILE --model package.module:Class"
WEIGHTS = "ckptool migrate FILE --form state_dict"


class Explanation(NamedTuple):
    """What a message means. ``kind`` is stable, for programs."""

    kind: str
    meaning: str
    hint: str | None = None
    command: str | None = None
    """The command line that carries out the hint. If no file was given, it has FILE in place of the path."""
    in_file: str | None = None
    """What in the file that was given causes the message; or that nothing in it does."""


class Cause(NamedTuple):
    """
    What in the file causes a message, and what to do about it. Without a ``hint``, that of the message is kept.

    Without both, the command is 'ckptool inspect'.
    """

    fact: str
    hint: str | None = None
    command: str | None = None


class KeyLists(NamedTuple):
    """The names in a message: those that the file lacks, and those that the model does not expect."""

    missing: list[str]
    unexpected: list[str]


def key_lists(text: str) -> KeyLists:
    """Return the names that a message lists; empty lists if it lists none."""
    text = _LINES.sub(_on_one_line, _NO_COLON.sub(r"\1: ", text))
    every = ((name, kind) for found, kind in _ROW.findall(text) for name in _expanded(found))
    rows = list(islice(every, MOST_NAMES))
    missing, unexpected = (
        [*_names_after(text, heading), *(name for name, found in rows if found == kind)]
        for heading, kind in ((_MISSING, "MISSING"), (_UNEXPECTED, "UNEXPECTED"))
    )
    if "adapter" in text:
        missing = [without_adapter(name) for name in missing]
    return KeyLists(*(list(dict.fromkeys(names))[:MOST_NAMES] for names in (missing, unexpected)))


def mismatched(text: str) -> list[str]:
    """Return the names of tensors whose sizes differ, according to a message."""
    rows = (name for found, kind in _ROW.findall(text) if kind == "MISMATCH" for name in _expanded(found))
    return list(islice(dict.fromkeys([*_MISFIT.findall(text), *rows]), MOST_NAMES))


def _on_one_line(found: re.Match[str]) -> str:
    return f"{found[1]}: {', '.join(name for line in found[2].splitlines() for name in _expanded(line.strip()))}\n"


def without_adapter(name: str) -> str:
    """Return the name of an adapter's tensor in its file: it does not contain the adapter's own name."""
    return _OF_ADAPTER.sub(r"\1", name)


def _expanded(name: str) -> list[str]:
    """Return all names that a name with braces stands for: ``layers.{0...31}.w``, ``norm.{bias, weight}``."""
    choices = [
        [str(one) for one in range(int(braces[1]), int(braces[2]) + 1)]
        if braces[1]
        else re.findall(r"[\w.]+", braces[3])
        for braces in _BRACES.finditer(name)
    ]
    plain = _BRACES.sub("\0", name).split("\0")
    chosen = islice(product(*choices), MOST_NAMES)
    return ["".join(chain(*zip(plain, (*numbers, ""), strict=True))) for numbers in chosen]


def form_of(text: str, checkpoint: Checkpoint | None = None) -> str:
    """Return the form of checkpoint that a message about names is about; torch.distributed.checkpoint has own texts."""
    if re.search("[Mm]issing key in checkpoint|between saved torch", text):
        return "dcp"
    return "safetensors" if checkpoint is not None and checkpoint.traits.is_plain else "state_dict"


def names_meet(
    expected: Collection[str], found: Collection[str], *, every: bool = True, guesses: bool = True
) -> Renames | None:
    """
    Return changes to the names ``found``, after which no ``expected`` one is missing; None if none are known.

    If not ``every`` name is listed, names that both sides have may be lacking. For a single name, nothing is guessed:
    it could match by chance.
    """
    wanted, there = dict.fromkeys(expected, ()), dict.fromkeys(found, ())
    matched = match(wanted, there)
    is_whole = bool(matched.pairs) and all(map(may_be_missing, matched.missing))
    is_for_all = not every and any(change.option == "add_prefix" for change in matched.changes)
    is_seen_through = matched.target_wrapped and matched.changes
    is_odd = any(change.option == "add_prefix" for change in matched.changes) and not _is_on_all(there, matched.changes)
    if is_whole and not (matched.alternatives or is_seen_through or is_for_all or is_odd):
        return matched.changes
    if not guesses or len(wanted) == 1:
        return None
    guessed = guess_renames(wanted, there, every=every)
    if not guessed:  # messages may list names in any order; then only a single change is no chance
        wanted, there = dict.fromkeys(sorted(wanted), ()), dict.fromkeys(sorted(there), ())
        guessed = guess_renames(wanted, there, every=every)
        guessed = guessed if len(guessed) == 1 else ()
    return guessed or None


def _is_on_all(names: Collection[str], changes: Renames) -> bool:
    """Say whether a prefix that is taken off is on all names."""
    for change in changes:
        before, names = list(names), renamed(list(names), (change,)) or names
        if change.option == "strip_prefix" and any(map(eq, before, names)):
            return False
    return True


def rename_hint(changes: Renames) -> str:
    """Return the hint for a command that renames; it is conditional if the changes are guessed (``rename``)."""
    is_sure = all(change.option != "rename" for change in changes)
    return "Rename them." if is_sure else "If these are the same tensors, rename them."


def explain_keys(text: str) -> Explanation | None:
    """Return an explanation of lists of missing and unexpected keys, by how they can be made to meet; else None."""
    missing, unexpected = key_lists(text)
    if not missing and not unexpected:
        return None
    if all(map(is_extra_state, (*missing, *unexpected))):
        return _extra_state(missing, unexpected, form_of(text))
    lacks = f"lacks {counted(len(missing), 'name')} of the model" if missing else ""
    has = f"has {counted(len(unexpected), 'name')} that the model lacks" if unexpected else ""
    counts = f"The file {', and '.join(filter(None, (lacks, has)))}"
    changes = names_meet(missing, unexpected, every=False)
    if changes:
        words = [word for change in changes for word in change.arguments]
        return Explanation(
            "keys-renamed",
            f"{counts}. A change of names would match {min(len(missing), len(unexpected)):,} of them.",
            rename_hint(changes),
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
    """Return whether the unexpected names are entries of a checkpoint, and not names of tensors."""
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


def _names_after(text: str, heading: re.Pattern[str]) -> list[str]:
    names: dict[str, None] = {}
    done = 0
    for begin in heading.finditer(text):
        if begin.start() < done:  # each part is read once
            continue
        listed = _LIST.match(text, begin.end())
        start = listed.end() if listed else begin.end()
        end = (_CLOSED if listed else _END).search(text, start)
        done = end.start() if end else len(text)
        part = text[start:done]
        found = [double or single for double, single in _QUOTED.findall(part)]
        names |= dict.fromkeys(found or _BARE.findall(part if listed else part.partition(":")[2]))  # quotes get lost
    return list(names)
