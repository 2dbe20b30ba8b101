"""
How model parallelism cuts tensors: rules for the slices of ranks, there and back.

    GLOB=DIM         each rank has a slice along a dimension, in the order of the ranks
    GLOB=DIM/2       two tensors in one, of each of which a rank has a slice; DIM/8:2:2 where they are not of one size
    GLOB=DIM@WIDTH   rows of the whole have so many elements: a number, or as many as those of another tensor
    GLOB=same        every rank has all of it
    NAME             the rules of a program that writes such files

Numbers may be expressions, as in recipes. No value is computed: ranges of bytes are joined, and cut.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from ckptool.errors import MigrationRefused
from ckptool.messages import counted, some
from ckptool.names.renaming import matches
from ckptool.recipes.moves import Tensors, chunks, concatenated, cut, plain, settled
from ckptool.recipes.recipe import Number, Numbers, Recipe
from ckptool.recipes.slice_sets import NAMED, SliceSet
from ckptool.tensors.reading import LazyTensor

_SAME: Final = "same"
_HOW: Final = re.compile(r"(?P<dim>\d{1,2})(?:/(?P<shares>[^@]+))?(?:@(?P<width>.+))?")
_PIECE_NBYTES: Final = 1 << 20


class SliceRule(NamedTuple):
    """How the tensors whose names match a glob are cut for ranks."""

    text: str
    glob: str
    dim: int | None
    """None if every rank has the whole tensor."""
    shares: tuple[Number, ...] = (1,)
    """Relative sizes of the tensors that one consists of; a single number is how many of equal size there are."""
    width: str | None = None
    """The last dimension of the whole tensor: that of a tensor with this name, or a number."""


class SliceRules:
    """The rules that a caller requested."""

    def __init__(self, given: Sequence[str]) -> None:
        """
        Raises:
            MigrationRefused: One is not a rule, or is the name of no set of rules; or there are two sets.
        """
        named = [text for text in given if "=" not in text]
        if unknown := [text for text in named if text not in NAMED]:
            hint = f"A rule is GLOB=DIM or GLOB=same, or one of {some(list(NAMED), len(NAMED))}."
            raise MigrationRefused(f"there are no rules of slices {unknown[0]!r}", kind="no-such-rules", hint=hint)
        if len(named) > 1:
            raise MigrationRefused(f"two sets of rules for slices: {some(named)}", kind="slices-overlap")
        self.of = NAMED[named[0]] if named else SliceSet()
        own = [text for text in given if "=" in text]
        self._rules = [_rule(text) for text in (*self.of.rules, *own)]

    @property
    def form(self) -> Literal["state_dict", "safetensors"]:
        """The form of the files that are written, if none is requested."""
        return "state_dict" if self.of.written.endswith(".pth") else "safetensors"

    def file_name(self, rank: int, form: str) -> str:
        """
        Return the name of the file of a rank.

        Raises:
            MigrationRefused: There are no such files in this form, or they must contain more than weights.
        """
        name = self.of.written.format(rank)
        if not name:
            fact = f"files of {self.of.name!r} have more in them than weights, and are not written"
            raise MigrationRefused(fact, kind="slices-form", hint="Give rules of your own: '*.wo.weight=1'.")
        suffix = ".safetensors" if form == "safetensors" else ".pth"
        if "." in name and not name.endswith(suffix):
            fact = f"{name!r} is no file of form {form!r}"
            raise MigrationRefused(fact, kind="slices-form", hint="Leave out `form=`.")
        return name if "." in name else name + suffix

    def numbers(self, given: Mapping[str, int], ranks: int) -> Numbers:
        """
        Return the numbers for the expressions in rules.

        Raises:
            MigrationRefused: The ranks cannot have equal shares of something, so that some have copies.
        """
        for name in self.of.per_rank:
            if given.get(name, 0) % ranks:
                fact = f"{name} is {given[name]}, which {ranks} ranks do not share equally: some have copies"
                raise MigrationRefused(fact, kind="slices-shape")
        return Numbers(Recipe(self.of.name, (), lets=self.of.lets), given)

    def by_name(self, names: Collection[str]) -> dict[str, SliceRule]:
        """
        Return the rule for each name.

        Raises:
            MigrationRefused: No rule matches a name, or two do.
        """
        found = {name: [rule for rule in self._rules if matches(rule.glob, name)] for name in names}
        if two := next((name for name, rules in found.items() if len(rules) > 1), None):
            fact = f"two rules are about {two!r}: {found[two][0].text} and {found[two][1].text}"
            raise MigrationRefused(fact, kind="slices-overlap")
        if rest := [name for name, rules in found.items() if not rules]:
            fact = f"no rule says how {counted(len(rest), 'tensor')} of {len(names):,} would be cut: {some(rest)}"
            raise MigrationRefused(fact, kind="slices-rest", hint="Add `join=`, as 'GLOB=0' or 'GLOB=same', for each.")
        return {name: rules[0] for name, rules in found.items()}


def _rule(text: str) -> SliceRule:
    glob, _, how = text.rpartition("=")
    if how == _SAME:
        return SliceRule(text, glob, None)
    found = _HOW.fullmatch(how)
    if found is None or not glob:
        hint = "A rule is GLOB=DIM, GLOB=DIM/PARTS, or GLOB=same: '*.wo.weight=1'."
        raise MigrationRefused(f"no rule of slices: {text!r}", kind="bad-slices", hint=hint)
    shares = [int(one) if one.strip().isdecimal() else one for one in (found["shares"] or "1").split(":")]
    return SliceRule(text, glob, int(found["dim"]), tuple(shares), found["width"])


def joined(rule: SliceRule, parts: Sequence[LazyTensor], numbers: Numbers) -> LazyTensor:
    """
    Return the whole tensor that slices make up, in the order of the ranks.

    Raises:
        MigrationRefused: Shapes or types do not fit; a tensor that must be the same differs; or slices are copies.
    """
    parts = [plain(one) for one in parts]
    first = parts[0]
    for rank, other in enumerate(parts[1:], 1):
        is_like = other.dtype == first.dtype and len(other.shape) == len(first.shape)
        if not is_like or (rule.dim is None and other.shape != first.shape):
            here, there = (f"{one.dtype} {list(one.shape)}" for one in (first, other))
            fact = f"{first.name!r} is {here} in the first rank, and {there} in rank {rank} of {rule.text}"
            raise MigrationRefused(fact, kind="slices-shape")
        if rule.dim is None and not _are_equal(first, other):
            fact = f"{first.name!r} is not the same in all ranks: its bytes differ in rank {rank}"
            raise MigrationRefused(fact, kind="slices-differ", hint="It may be cut, or not all files are of one save.")
    if rule.dim is None:
        return first
    if len(parts) > 1 and len(first.shape) > 1 and not _is_constant(first) and _are_equal(first, parts[1]):
        fact = f"{first.name!r} is the same in the first two ranks, and {rule.text} says that it is cut"
        raise MigrationRefused(fact, kind="slices-differ", hint="Where every rank has all of it, say GLOB=same.")
    rows = [_blocks(rule, one, numbers) for one in parts]
    return _together(rule, [block for column in zip(*rows, strict=True) for block in column])


def slices(rule: SliceRule, whole: LazyTensor, ranks: int, numbers: Numbers) -> Tensors:
    """
    Return the slice of a tensor for each rank.

    Raises:
        MigrationRefused: It cannot be cut by the rule.
    """
    if rule.dim is None:
        return [whole] * ranks
    rows = [chunks(block, rule.dim, ranks) for block in _blocks(rule, plain(whole), numbers)]
    return [_together(rule, column) for column in zip(*rows, strict=True)]


def refuse_width(rule: SliceRule, whole: LazyTensor, others: Mapping[str, LazyTensor], numbers: Numbers) -> None:
    """Raise MigrationRefused if the rows of a whole tensor have another length than in its rule."""
    if rule.width is None:
        return
    wanted = others[rule.width].shape[-1] if rule.width in others else numbers.value(rule.width)
    if whole.shape[-1:] != (wanted,):
        fact = f"{whole.name!r} would be {list(whole.shape)}, and {rule.width!r} says that its rows have {wanted:,}"
        named = [name for name in NAMED if rule.text not in NAMED[name].rules]
        hint = f"The last rank is missing, or it is cut in another way: there are the rules of {some(named, 8)}."
        raise MigrationRefused(fact, kind="slices-shape", hint=hint)


def _blocks(rule: SliceRule, tensor: LazyTensor, numbers: Numbers) -> Tensors:
    """Return the tensors that one consists of."""
    assert rule.dim is not None  # what is the same is not cut
    shares = [*map(numbers.value, rule.shares)]
    shares = shares if len(shares) > 1 else [1] * shares[0]
    if len(shares) == 1:
        return [tensor]
    total, size = sum(shares), sum(tensor.shape[rule.dim : rule.dim + 1])
    if min(shares, default=0) < 1 or size % total:
        said = ":".join(map(str, shares))
        fact = f"{tensor.name!r} {list(tensor.shape)}: its {size} along {rule.dim} are not made of {said}"
        raise MigrationRefused(fact, kind="slices-shape")
    return cut(tensor, rule.dim, [share * size // total for share in shares])


def _together(rule: SliceRule, blocks: Sequence[LazyTensor]) -> LazyTensor:
    assert rule.dim is not None  # as above
    return settled(concatenated(blocks, rule.dim, None) if len(blocks) > 1 else blocks[0])


def _are_equal(one: LazyTensor, other: LazyTensor) -> bool:
    sides = (tensor.chunks(_PIECE_NBYTES) for tensor in (one, other))
    return one.shape == other.shape and all(a == b for a, b in zip(*sides, strict=True))


def _is_constant(tensor: LazyTensor) -> bool:
    """Return whether the first elements are all the same: zeros, as before training, are no sign of a copy."""
    head = next(iter(tensor.chunks(_PIECE_NBYTES)), b"")
    itemsize = tensor.info.dtype.itemsize
    return head == head[:itemsize] * (len(head) // itemsize)
