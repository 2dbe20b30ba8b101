"""Pieces of text for people: counts, first names of many, sizes, text that is safe to print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

_LONGEST_VALUE: Final = 1 << 16

FORMS: Final = {
    "state_dict": "state_dict",
    "checkpoint": "checkpoint: weights and more",
    "model": "model",
    "training": "training state: no weights",
    "tensors": "tensors, not named by a model",
    "data": "no tensors",
    "archive": "archive of several checkpoints",
}
"""What text calls each form."""

LISTED: Final = 8
"""How many items of a list are shown."""
MANY_ZEROED: Final = 0.01
"""A cast is reported if more than this share of a tensor's nonzero values become zero."""
_LABEL: Final = 13


def counted(number: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless it is 1."""
    if number == 1:
        return f"1 {noun}"
    ending = f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2:-1] not in "aeiou" else f"{noun}s"
    return f"{number:,} {ending}"


def rough(number: int) -> str:
    """Return a rounded count to print after the exact one, as in " (1.24B)"; an empty text for a small one."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= 0.9995 * size:
            return f" ({number / size:.3g}{unit})"
    return ""


def some(names: Sequence[str], most: int = 3) -> str:
    """Return the first ``most`` names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def not_looked_into(folders: Sequence[str]) -> str:
    """Say which folders were left out where others were searched for checkpoints."""
    what = f"{counted(len(folders), 'folder')} of version control or of tools, or behind links that lead elsewhere"
    return f"{what}: {some([show(one) for one in folders], 4)}"


def show(text: str) -> str:
    """Return text that is safe to print on one line: characters that are not printable or invisible are escaped."""
    return text if text.isascii() and text.isprintable() else text.translate(_SHOWN)


_UNSEEN: Final = (
    *((0x00AD, 0x00AD), (0x034F, 0x034F), (0x061C, 0x061C), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F)),
    *((0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF)),
    *((0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF)),
    # These are not default-ignorable code points, but invisible as well: blank braille, a filler, a null notehead.
    *((0x2800, 0x2800), (0x16FE4, 0x16FE4), (0x1D159, 0x1D159)),
)
"""Invisible code points, many of which count as printable (Unicode's Default_Ignorable_Code_Point)."""


class _Shown(dict[int, str]):
    """A table for ``str.translate``: what is shown for each character, computed when it is first met."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        seen = char.isprintable() and not any(first <= code <= last for first, last in _UNSEEN)
        self[code] = char if seen else char.encode("unicode_escape", "surrogatepass").decode()
        return self[code]


_SHOWN = _Shown()


def show_nbytes(nbytes: int) -> str:
    """Return a size in bytes for people: three digits and a binary unit."""
    if nbytes < 1000:
        return f"{nbytes:,} B"
    size = nbytes / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def quoted(text: str, limit: int = 80) -> str:
    """Return text in quotes on one line, cut to ``limit`` characters, with what could control a terminal escaped."""
    line = " ".join(text[: 16 * limit].split())
    cut = line[:limit]
    while len(show(repr(cut))) > limit + 2:  # escapes are longer than what they stand for
        cut = cut[:-1]
    return show(repr(cut if cut == line else cut + "…"))


def as_path(path: str) -> str:
    """Return a path in quotes on one line; repr() would double the backslashes of Windows."""
    return f"'{show(path)}'"


def for_shell(text: str) -> str:
    """Return text in single quotes, as repr() does it, so that a POSIX shell takes it literally whatever it holds."""
    return "'" + text.replace("'", "'\"'\"'") + "'"


def cut(text: str, most: int = _LONGEST_VALUE) -> str:
    """Return text as it is; if it has more than ``most`` characters, its beginning and how many it has."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def labelled(label: str, text: str) -> str:
    """Return one line of a report's head: the label in a column, then the text."""
    return f"  {label:<{_LABEL}}{text}"


def listed(label: str, items: Sequence[str], most: int | None = LISTED) -> Iterator[str]:
    """Yield a line for each of the first ``most`` items, and how many more there are."""
    for index, item in enumerate(items[:most]):
        yield labelled(label if index == 0 else "", item)
    if most is not None and len(items) > most:
        yield labelled("", f"and {len(items) - most:,} more")


def grouped(names: Sequence[str], noun: str, depth: int = 1) -> list[str]:
    """Return the names; if they are many, the first ``depth`` components of each, and how many begin with these."""
    if len(names) <= LISTED:
        return [show(name) for name in names]
    heads = Counter(first_components(name, depth) for name in names)
    return [show(head) if count == 1 else f"{show(head)}: {count:,} {noun}" for head, count in heads.items()]


def first_components(name: str, depth: int) -> str:
    """Return the first ``depth`` components of a name."""
    return ".".join(name.split(".", depth)[:depth])


def counts(found: Mapping[str, int]) -> str:
    """Return the names with their counts, as text."""
    return ", ".join(f"{show(name)} ({count:,})" for name, count in found.items())


def not_cast(kept: Sequence[str]) -> str:
    """Return the text for tensors that a cast did not change; each of ``kept`` is a name with its type."""
    return f"{counted(len(kept), 'tensor')} not cast, of types that no cast is about: {some(kept)}"


def no_values(names: Sequence[str]) -> str:
    """Say which tensors were saved from the meta device."""
    return f"{counted(len(names), 'tensor')} on the meta device, without values: {some(names)}"


def zero_now(shares: Mapping[str, float], dtype: str) -> str:
    """Return the text for tensors with values too small for a type: ``shares`` of the nonzero ones, by name."""
    listed = some([f"{name} ({'all' if share == 1 else f'{share:.1%}'})" for name, share in shares.items()])
    return f"values of {counted(len(shares), 'tensor')} are too small for {dtype}, and zero in it: {listed}"
