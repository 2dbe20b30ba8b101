"""
What an index says of each name: a tensor with its boxes and items, an item that is a value, or neither.

While an index is read, its nodes fill the memory, and a name or a number that stays here and there would keep all of
it. So what is found is written down first, in few large objects, and made when the nodes are gone.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple, TypeAlias

from ckptool.errors import CkptoolError
from ckptool.formats.directories.tree import Path
from ckptool.tensors.dtypes import DType
from ckptool.tensors.pieces import Box


class Item(NamedTuple):
    """Bytes of a file that are one piece of a tensor, or one value."""

    file: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...] = ()
    """What to undo before the bytes are those of ``torch.save``, in this order."""


class Entry(NamedTuple):
    """A tensor of the index: its boxes, sorted by their offsets, and the item of each."""

    dtype: DType
    shape: tuple[int, ...]
    boxes: Sequence[Box]
    items: Sequence[Item | None]
    """None where the index has no item for a box."""
    fault: CkptoolError | None = None
    """Why its pieces are not the whole tensor."""


class Use(NamedTuple):
    """What the index says about one file."""

    items: int
    end: int
    """Where the last of its items ends."""
    overlap: int | None
    """Where an item begins before the end of another one that begins elsewhere; None if none does."""
    shared: int | None = None
    """Where several items begin; None if there is no such place."""


class Found(NamedTuple):
    """What was written down, made again."""

    entries: dict[str, Entry | Item | None]
    paths: dict[str, Path]
    files: dict[str, Use]


_NONE: Final = -1
_FAULTY: Final = -2
_Label: TypeAlias = tuple[str, tuple[str, ...]]
"""The file of an item, and its transforms."""


class Record:
    """Entries, written down one after the other."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._numbers = array("q")
        """
        Of each tensor: which type it has, how many dimensions and boxes, its shape; then of each box its offsets, its
        sizes and its item. A value has no type, and an item alone.
        """
        self._dtypes: list[DType] = []
        self._labels: dict[_Label, int] = {}
        self._faulty: dict[int, Entry] = {}
        """Few are: they stay as they are."""

    def value(self, name: str, item: Item | None) -> None:
        """Add a value."""
        self._names.append(name)
        self._numbers.append(_NONE)
        self._item(item)

    def tensor(self, name: str, entry: Entry) -> None:
        """Add a tensor."""
        self._names.append(name)
        if entry.fault is not None:
            self._faulty[len(self._names) - 1] = entry
            self._numbers.append(_FAULTY)
            return
        if entry.dtype not in self._dtypes:
            self._dtypes.append(entry.dtype)
        numbers = self._numbers
        numbers.extend((self._dtypes.index(entry.dtype), len(entry.shape), len(entry.boxes)))
        numbers.extend(entry.shape)
        for (offsets, sizes), item in zip(entry.boxes, entry.items, strict=True):
            numbers.extend(offsets)
            numbers.extend(sizes)
            self._item(item)

    def _item(self, item: Item | None) -> None:
        if item is None:
            self._numbers.append(_NONE)
            return
        label = self._labels.setdefault((item.file, item.transforms), len(self._labels))
        self._numbers.extend((label, item.offset, item.nbytes))

    def packed(self, paths: Mapping[str, Path], files: Mapping[str, Use]) -> Packed:
        """Return all that was added, with where names are in the state dict, and how files are used."""
        # What has no path of its own is under its name.
        keys = [None if paths.get(name, (name,)) == (name,) else paths[name] for name in self._names]
        # Not as escapes: two halves of a surrogate pair, which pickles can hold apart, would be one character then.
        texts = json.dumps([self._names, keys, list(self._labels), list(files.items())], ensure_ascii=False)
        return Packed(texts, self._numbers, tuple(self._dtypes), self._faulty)


class Packed(NamedTuple):
    """Entries in a few large objects."""

    texts: str
    numbers: array[int]
    dtypes: tuple[DType, ...]
    faulty: dict[int, Entry]

    def made(self) -> Found:
        """Return the entries."""
        names, keys, labels, files = json.loads(self.texts)
        numbers = iter(self.numbers)
        known = [(file, tuple(transforms)) for file, transforms in labels]
        entries: dict[str, Entry | Item | None] = {}
        before: Entry | None = None
        for at, name in enumerate(names):
            dtype = next(numbers)
            if dtype == _FAULTY:
                entries[name] = self.faulty[at]
            elif dtype == _NONE:
                entries[name] = _item(numbers, known)
            else:
                entries[name] = before = _entry(self.dtypes[dtype], numbers, known, before)
        paths = {name: tuple(path) for name, path in zip(names, keys, strict=True) if path is not None}
        return Found(entries, paths, {file: Use(*use) for file, use in files})


def _entry(dtype: DType, numbers: Iterator[int], labels: Sequence[_Label], before: Entry | None) -> Entry:
    """Return a tensor, which shares with the one ``before`` what is equal: many are cut alike."""
    rank, count = next(numbers), next(numbers)
    shape = sizes = tuple(islice(numbers, rank))
    boxes: list[Box] = []
    items: list[Item | None] = []
    for _ in range(count):
        offsets, own = tuple(islice(numbers, rank)), tuple(islice(numbers, rank))
        if own != sizes:  # most are alike
            sizes = own
        boxes.append((offsets, sizes))
        items.append(_item(numbers, labels))
    if before is not None and boxes == before.boxes:
        return Entry(dtype, before.shape if shape == before.shape else shape, before.boxes, items)
    return Entry(dtype, shape, boxes, items)


def _item(numbers: Iterator[int], labels: Sequence[_Label]) -> Item | None:
    label = next(numbers)
    if label == _NONE:
        return None
    file, transforms = labels[label]
    return Item(file, next(numbers), next(numbers), transforms)
