"""What few checkpoints have: shards, members, files beside them, the set that they are of, source code, remarks."""

from typing import NamedTuple

from ckptool.checkpoints.contents import Form
from ckptool.sources.source import Source


class Shard(NamedTuple):
    """One of the files that an index names, with some of the tensors."""

    name: str
    """As the index has it: a path from the index's folder."""
    tensors: int
    nbytes: int
    """Size of the file."""
    source: Source
    holds: str = "tensor"
    """What is counted: tensors, or items, which may be pieces of them."""


class Member(NamedTuple):
    """A checkpoint inside an archive that holds several: open it as ``FILE::NAME``."""

    name: str
    format: str
    form: Form
    tensors: int
    nbytes: int
    """Size of the member, unpacked."""


class Beside(NamedTuple):
    """Something that lies in the same folder, and is no part of the checkpoint that was opened."""

    name: str
    role: str
    """What it is for, by its name: ``optimizer``, ``scheduler``, ``rng``, ``duplicate``…"""
    path: str
    """The path to give, to open it."""
    nbytes: int | None = None
    """None for a folder."""
    about: str | None = None
    """What it says in short, where that is known without opening a checkpoint."""


class PartOf(NamedTuple):
    """The set of files that a file is one of."""

    what: str
    """What the file is, in words."""
    path: str
    """The path to give for all of them together."""
    is_slice: bool = False
    """Whether its tensors are parts themselves, or not all that a model has: no model fits it."""
    remedy: str = ""
    """What to do, where it is not to save the model whole."""


class ClassSource(NamedTuple):
    """The source of a class, as legacy files carry it. Text: never compiled."""

    name: str
    path: str
    """Of the source file on the machine that saved the checkpoint."""
    text: str


class Remark(NamedTuple):
    """Something notable that the reader of a format saw, and that is a finding: its code says how grave it is."""

    code: str
    what: str
    hint: str | None = None
