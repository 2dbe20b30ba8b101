"""
Groups files into sets by the numbers in their names alone.

    consolidated.00.pth, model_rank3.pt, model_1_of_2.pt        a word says it
    model_0.pt, model_1.pt      m_100.pt, m_200.pt              numbers do, from 0 or 1, or as far apart as the first is
    model_a.pt, model_b.pt      part_i.pt, part_ii.pt           letters, and words that count
    model.pt, model2.pt         layers_0-3.pt, layers_4-7.pt    the first without a number; ranges
    node0/gpu0.pt               mp_rank_00/model_weights.ckpt   in folders, too
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from math import gcd
from typing import Final, NamedTuple

from ckptool.messages import show, some

_COUNTING: Final = tuple(
    {word: number for number, word in enumerate(line.split(), 1)}
    for line in (
        "a b c d e f g h i j k l m n o p q r s t u v w x y z",
        "i ii iii iv v vi vii viii ix x xi xii xiii xiv xv xvi",
        "one two three four five six seven eight",
        "first second third fourth fifth sixth seventh eighth",
        "first last",
        "left right",
        "lower upper",
        "bottom top",
        "front back",
        "head tail",
    )
)
"""Words that count as numbers do, from 1."""
_WORD: Final = rf"(?<![^\W\d_])(?:{'|'.join({word for line in _COUNTING for word in line})})(?![^\W_])"
_KNOWN: Final = re.compile(
    r"(?:.*/)?consolidated\.(\d{2,3})\.(?:pth|pt|safetensors)|.*-model_part-(\d{1,4})(?:-shard\d+)?\.pt|"
    r"(?:.*/)?model-rank-(\d{1,4})-part-\d{1,5}\.safetensors|(?:.*/)?mp_rank_(\d{2,4})_model_states\.pt"
)
"""Names that only slices have, or the single file of a model."""
_RANKED: Final = re.compile(
    r"(?:^|(?<=[\W_\d]))(?:tp|mp|pp|rank|shard|part|partition|slice|stage|chunk|piece|fsdp|gpu|device|(?:tensor|model)[._-]?parallel)"
    rf"(?:[._-]?rank)?[._-]?(\d{{1,18}}(?=[\W_]|$)|{_WORD})|(?<!\d)(\d{{1,18}})(?=[._-]?of[._-]?\d)",
    re.IGNORECASE,
)
"""A number in a name that a word marks as that of a rank."""
_OF_ONE: Final = re.compile(
    r"tp|mp|pp|rank|shard|slice|fsdp|partition|parallel|(?:part|stage)[._-]?0+(?!\d)", re.IGNORECASE
)
"""Words that mark files as those of one model, however much they differ; the last two if numbers begin at 0."""
_OF_TENSORS: Final = re.compile(r"(?:^[tm]p(?:[._-]?rank)?|parallel)[._-]?0+(?!\d)", re.IGNORECASE)
"""Words that mark tensors as cut, even if each looks whole; numbers begin at 0."""
_NUMBER: Final = re.compile(rf"(?<!\d)\d{{1,18}}(?!\d)|{_WORD}", re.IGNORECASE)
_LAST: Final = re.compile(rf"(?:[ ._-]?(?:(?<!\d)\d{{1,4}}|\(\d{{1,4}}\))|[ ._-]{_WORD})(?=\.\w+\Z)", re.IGNORECASE)
"""The number of a file that was saved beside one without a number."""
_NO_RANK: Final = re.compile(r"(?:epochs?|steps?|iter(?:ation)?s?|folds?|seeds?|version|lora)[\W_]*\Z", re.IGNORECASE)
"""Words before numbers that are not ranks."""
_ALONE: Final = re.compile(
    r"(?:^|(?<=[\W_\d]))(?:(?:tp|mp(?![34])|pp|rank|shard|partition|slice)(?:[._-]?rank)?[._-]?0*[1-9]\d{0,2}|"
    r"(?:world[._-]?size[._-]?|\d[._-]?of[._-]?)0*(?:[2-9]|[1-9]\d))(?=[\W_]|$)",
    re.IGNORECASE,
)
"""Parts of names which show that there are several files."""
_MOST: Final = 4096
"""Most files of a set; more are a series."""


class Numbered(NamedTuple):
    """The files whose names differ from that of one file in numbers alone."""

    files: Sequence[str]
    """In the order of their numbers, with that file; one without a number comes before 1 or 2."""
    nearest: Sequence[str] = ()
    """The others to compare it with: one for each of the numbers that differ; empty if the file is in no set."""
    gap: str = ""
    """Which numbers between the first and the last are missing, in words; empty if none is."""
    total: int = 1
    """How many files there are, with the missing ones."""
    says_rank: bool = False
    """Whether a word marks the numbers as those of ranks, parts or stages."""
    says_one: bool = False
    """Whether a word marks the files as those of one model."""
    says_cut: bool = False
    """Whether a word marks the tensors as cut."""

    @property
    def has_bare(self) -> bool:
        """Whether the first file has no number."""
        return len(_spans(self.files[0])) < len(_spans(self.files[-1]))


_RULES: Final = (
    (re.compile(r"consolidated\.\d"), "meta-llama"),
    (re.compile(r".*model_part-\d"), "metaseq"),
    (re.compile(r"model-rank-\d"), "vllm"),
    (re.compile(r"mp_rank_\d+/"), "megatron"),
)
"""The set of rules that joins files with such names."""


def how_to_join(name: str, place: str) -> str:
    """Return a hint how to join the slices in a folder, one of which has this name."""
    rules = next((rules for pattern, rules in _RULES if pattern.match(name)), "")
    how = f"`join={rules!r}`" if rules else "`join=`, and rules that say how each tensor is cut"
    return f"Join them: migrate {show(place)} with {how}." if place and name.count("/") < 2 else ""


def is_known(name: str) -> bool:
    """Return whether only slices, or the single file of a model, have such a name."""
    return _KNOWN.fullmatch(name) is not None


def is_one_of_several(name: str) -> bool:
    """Return whether the name of a file shows that there are others."""
    one = _ALONE.search(name)
    return one is not None and not _NO_RANK.search(name[: one.start()])


@lru_cache(maxsize=1 << 14)  # each of thousands of files is compared with all others
def _spans(name: str) -> tuple[tuple[int, int], ...]:
    """Return the places of numbers in a name that may be those of ranks, and of words that count."""
    if (known := _KNOWN.fullmatch(name)) is not None:
        return (known.span(known.lastindex or 0),)
    ranked = {one.start(one.lastindex or 0) for one in _RANKED.finditer(name)}
    found = _NUMBER.finditer(name)
    return tuple(one.span() for one in found if one.start() in ranked or not _NO_RANK.search(name[: one.start()]))


@lru_cache(maxsize=1 << 14)
def numbers(name: str) -> tuple[str, tuple[str, ...]]:
    """Return a name with marks for its numbers and counting words, and these in lower case."""
    pattern = name
    for start, end in reversed(_spans(name)):
        pattern = f"{pattern[:start]}{'#' if name[start].isdecimal() else '@'}{pattern[end:]}"
    return pattern, tuple(name[start:end].lower() for start, end in _spans(name))


def set_of(name: str, names: Iterable[str]) -> Numbered:
    """Return the set that a file may belong to: most of its numbers exist, or they are ranges that continue."""
    return _set_of(name, tuple(names))


@lru_cache(maxsize=8)  # each set is requested twice
def _set_of(name: str, names: tuple[str, ...]) -> Numbered:
    alike = _counted(name, names)
    none = Numbered((name,))
    if len(alike) < 2 or len(alike) > _MOST:
        return none
    own = alike[name]
    rows: dict[int, dict[int, str]] = {}
    for place in range(len(own)):
        rest = own[:place], own[place + 1 :]
        row = {of[place]: one for one, of in alike.items() if (of[:place], of[place + 1 :]) == rest}
        if len(row) > 1 and (is_known(name) or _are_ranks(row)):
            rows[place] = row
    if rows:
        files = [one for one, of in alike.items() if all(of[at] == own[at] for at in range(len(own)) if at not in rows)]
        total, missing, nearest = 1, list[int](), list[str]()
        for row in rows.values():
            expected = range(min(row), max(row) + 1, _step(row))
            total *= len(expected)
            missing += [one for one in expected if one not in row]
            # The one without a number only if there is no other.
            nearest.append(min((-len(_spans(one)), number, one) for number, one in row.items() if one != name)[2])
        return _said(Numbered(sorted(files, key=alike.__getitem__), nearest, _gap(missing), total), rows)
    files = sorted(alike, key=alike.__getitem__)
    places = [place for place, column in enumerate(zip(*alike.values(), strict=True)) if len({*column}) > 1]
    missing = []
    if _are_ranges([alike[one] for one in files], places):
        first, last = places
        missing = [at for a, b in pairwise(files) for at in range(alike[a][last] + 1, alike[b][first])]
    elif not _are_diagonal([[found[at] for found in alike.values()] for at in places]):
        return none
    at = files.index(name)
    return _said(Numbered(files, files[at + 1 : at + 2] or files[at - 1 : at], _gap(missing), len(files)), places)


def _counted(name: str, names: Iterable[str]) -> Mapping[str, tuple[int, ...]]:
    """Return the numbers in names that differ in numbers alone; a name without one is before the name with 1 or 2."""
    bare = _LAST.sub("", name)
    stem = bare.rpartition(".")[0]
    after = (one for one in names if name == bare != one and one.startswith(stem) and _LAST.sub("", one) == bare)
    beside = min(after, default=name)
    pattern, own = numbers(beside)
    head = re.split("[#@]", pattern, maxsplit=1)[0]
    texts = {one: numbers(one) for one in (*names, beside) if own and one.startswith(head)}
    same = {one: found for one, (other, found) in texts.items() if other == pattern}
    lines = [_line(text, {found[place] for found in same.values()}) for place, text in enumerate(own)]
    counts = [tuple(line.get(text, -1) for line, text in zip(lines, found, strict=True)) for found in same.values()]
    alike = {one: found for one, found in zip(same, counts, strict=True) if -1 not in found}
    lowest = min(alike.values(), default=())
    if own and len(own) == len(numbers(bare)[1]) + 1 and lowest[-1] in (1, 2) and (name == bare or bare in names):
        alike[bare] = (*lowest[:-1], lowest[-1] - 1)
    return alike if name in alike else {}


def _line(text: str, column: Iterable[str]) -> Mapping[str, int]:
    """Return the numbers that texts in the place of this one mean; of two ways to count, that which fits more."""
    if text.isdecimal():
        return {one: int(one) for one in column}
    return max((line for line in _COUNTING if text in line), key=lambda line: len({*column} & line.keys()), default={})


def _said(found: Numbered, places: Iterable[int]) -> Numbered:
    """Return a set with the meaning of the words at the numbers that differ."""
    first, last = found.files[0], found.files[-1]
    differ = {_spans(last)[at][0] for at in places}
    says_rank = any(one.start(one.lastindex or 0) in differ for one in _RANKED.finditer(last))
    words = [one[0] for one in _RANKED.finditer(first)] if says_rank else []
    return found._replace(
        says_rank=says_rank,
        says_one=any(map(_OF_ONE.search, words)),
        says_cut=any(map(_OF_TENSORS.search, words)),
    )


def _gap(missing: Sequence[int]) -> str:
    shown = some([str(one) for one in missing])
    return f" ({'number' if len(missing) == 1 else 'numbers'} {shown} not there)" if missing else ""


def _step(row: Collection[int]) -> int:
    """Return the distance between the numbers of a set: 1 if most of 0, 1, 2 and so on exist."""
    return 1 if min(row) <= 1 and max(row) - min(row) < 2 * len(row) else gcd(*row)


def _are_ranks(row: Collection[int]) -> bool:
    """Return whether most of the numbers 0, 1, 2 and so on exist, or of their multiples."""
    first, last = min(row) // _step(row), max(row) // _step(row)
    return first <= 1 and last - first < 2 * len(row)


def _are_diagonal(columns: Sequence[Sequence[int]]) -> bool:
    """Return whether all numbers that differ count the files: ``node0/gpu0.pt``, ``node1/gpu1.pt``."""
    return bool(columns) and all(len({*column}) == len(column) and _are_ranks(column) for column in columns)


def _are_ranges(found: Sequence[tuple[int, ...]], places: Sequence[int]) -> bool:
    """Return whether two numbers in each name are a range that ends before the range in the next name begins."""
    ranges = [tuple(one[at] for at in places) for one in found]
    return len(places) == 2 and ranges[0][0] <= 1 and all(a <= b <= c for (a, b), (c, _) in pairwise(ranges))
