"""``Changes``: what a caller asks of a migration; and the device tags that result."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypedDict

from ckptool.arguments import check_arguments, spelled_right
from ckptool.checkpoints.weights import WeightsChoice
from ckptool.errors import MigrationRefused
from ckptool.names import renaming
from ckptool.tensors.dtypes import spelled
from ckptool.tensors.tensor import TensorInfo

DeviceTags: TypeAlias = str | Mapping[str, str]
"""One tag for everything, or new tags by old ones, as ``map_location`` takes them: others stay."""
_SIZE: Final = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(?:([KMGT])(?:(I?)B)?|B)\s*", re.IGNORECASE)
_STEPS: Final = "KMGT"


def new_tag(tags: DeviceTags | None, old: str) -> str:
    """Return the tag that takes the place of another."""
    if tags is None or isinstance(tags, str):
        return tags or old
    return tags.get(old, old)


def retagged(info: TensorInfo, tags: DeviceTags | None) -> str:
    """Return the tag of a tensor in the new file; tensors on the meta device and numpy arrays keep theirs."""
    is_tagged = (info.storage or info.parts) and not info.is_array
    return new_tag(tags, info.location) if is_tagged else info.location


TargetForm: TypeAlias = Literal["same", "state_dict", "safetensors", "model", "dcp"]
OptimizerNames: TypeAlias = Literal["nested", "flat", "torchtitan"]
NameRule: TypeAlias = str | tuple[str, str] | renaming.Rule
_LISTS: Final = ("include", "exclude", "drop", "keep_dtype", "strip_prefix", "add_prefix", "drop_metadata", "join")


@spelled_right
class Changes(NamedTuple):
    """
    What is to be different in the target. Everything else stays as it is.

    Names change in this order: wrappers are stripped, then prefixes are stripped and added, then the items of
    ``rename`` apply, one after the other. An item is a text ``RE=REPL``, or a pair of a regular expression and its
    replacement, as for ``re.sub``: ``(r"^model\\.", "")``. It can also be a function from all names to as many new
    ones, in the same order. A text where there can be several is one of them.
    """

    form: TargetForm | None = None
    """What to write; with None, the target's suffix decides."""
    max_shard_size: int | str | None = None
    """
    Write a folder of safetensors shards, each with at most that many bytes of tensors, or with one larger tensor:
    ``"5GB"``, ``"5GiB"``, or a number. With form ``dcp``, files of at most so many bytes of items.
    """
    optimizer_names: OptimizerNames | None = None
    """
    With form ``dcp``, give the states of optimizers the names of parameters: ``nested``, as torch's ``get_state_dict``
    does; ``flat``, as with its ``flatten_optimizer_state_dict``; or as ``torchtitan``, with the weights under no key.
    With None, they have the numbers of the source.
    """
    to: DeviceTags | None = None
    """The device tag that every storage gets; or new tags by old ones, as for ``map_location``: other tags stay."""
    key: str | None = None
    """Which state dict to take, by its path in the source."""
    weights: WeightsChoice = "auto"
    """
    Which weights to take where there are several: ``raw``, ``ema``, or ``auto`` for the model's; ``module`` for those
    that DeepSpeed's model computed with, which may be rounded.
    """
    strip_module: bool = False
    """Remove what DataParallel and DistributedDataParallel added to names."""
    strip_wrappers: bool = False
    """Remove what training wrappers added to names, however they are nested."""
    strip_prefix: Sequence[str] = ()
    """Prefixes of whole components to remove."""
    add_prefix: Sequence[str] = ()
    """Prefixes to put in front of every name."""
    rename: Sequence[NameRule] = ()
    include: Sequence[str] = ()
    """
    Globs: take only names that match one. They are compared with the names in the source, with or without the key of
    their state dict; where both match, and not the same, a dot in front means the full path.
    """
    exclude: Sequence[str] = ()
    """Globs: leave out names that match one."""
    drop: Sequence[str] = ()
    """Paths or roles (``optimizer``, ``ema``) to leave out."""
    dtype: str | Any | None = None
    """
    Floating type that weights are cast to, averaged ones too; an optimizer's state is not. ``"float16"``, ``"fp16"``
    and ``torch.float16`` are one.
    """
    keep_dtype: Sequence[str] = ()
    """Regular expressions: names that match one keep their type."""
    saturate: bool = False
    """Values too large for ``dtype`` become its largest."""
    break_quantized: bool = False
    """Cast quantised weights and their scales as they are, or leave out scales: the values are wrong then."""
    dequantize: bool = False
    """
    Make quantised weights dense, of type ``dtype``; without it, of the type of their scales, or bfloat16. Scales are
    left out.
    """
    recipe: str | PathLike[str] | None = None
    """
    Write the weights in another layout: a recipe by its name, or the path of one of TOML. It is applied to the names as
    they are after all other changes.
    """
    reverse: bool = False
    """Apply the recipe in reverse."""
    recipe_arguments: Mapping[str, int] = {}
    """Numbers that the recipe or the rules of slices need, and that no ``config.json`` beside the source gives."""
    like: str | PathLike[str] | None = None
    """
    Another checkpoint: write the weights under its names, in its shapes. The renames and the recipe that lead to them
    are searched for, and noted; none, or more than one, is refused with what is left.
    """
    join: Sequence[str] = ()
    """
    Rules for the slices of ranks: ``GLOB=DIM``, ``GLOB=same``, or the name of a set of rules, as ``meta-llama``. The
    source is a folder with the files of all ranks, or one of these files; all other changes are of the whole weights.
    """
    cut: int | None = None
    """Write a folder with the slices that so many ranks have, a file for each, by the rules in ``join``."""
    expand_tied: bool = False
    """Write tied tensors under each name (safetensors)."""
    drop_unsupported: bool = False
    """Leave out what the target cannot hold; from a state dict, what ``torch.load`` refuses by default."""
    allow_empty: bool = False
    """Allow a result without tensors, or without elements, and an ``include`` that matches nothing."""
    allow_unmatched: bool = False
    """Allow globs, patterns and renames that are about no name in the source, and devices that no tensor is on."""
    allow_missing: bool = False
    """Go on where the file does not have all that a ``state_dict()`` of these weights would hold."""
    keep_calls: bool = False
    """
    Keep calls that reach the system: commands, text that is run, files, connections. In a state dict, keep all that
    ``torch.load`` refuses by default.
    """
    set_metadata: Mapping[str, str] = {}
    """Text to keep beside the tensors of safetensors, by its keys; the library's ``metadata()`` gives it."""
    drop_metadata: Sequence[str] = ()
    """Globs: leave out keys of such text that match one. ``set_metadata`` is applied after that."""
    config_from: str | None = None
    """
    A folder whose ``config.json``, tokenizer and the like go along into a folder of safetensors; the type that is named
    there becomes ``dtype``.
    """
    model: str | None = None
    """
    ``package.module:Class`` or ``path/to/file.py:Class`` to build for form ``model``. It is imported because the caller
    named it; the current folder is searched first.
    """
    model_arguments: Mapping[str, object] = {}
    """Keyword arguments for ``model``."""

    def __dir__(self) -> tuple[str, ...]:
        return self._fields

    def in_full(self) -> Changes:
        """
        Return the same changes normalised: lists of texts, all changes of names as rules, torch's name of the type.
        """
        given: dict[str, Any] = self._asdict()
        given |= {name: (given[name],) if isinstance(given[name], str) else tuple(given[name]) for name in _LISTS}
        rules = [renaming.strip_prefix(prefix) for prefix in given["strip_prefix"]]
        rules += [renaming.add_prefix(prefix) for prefix in given["add_prefix"]]
        for item in (self.rename,) if isinstance(self.rename, str) else self.rename:
            pair = renaming.substitution(item) if isinstance(item, str) else item
            rules.append(renaming.substitute(*pair) if isinstance(pair, tuple) else pair)
        dtype = None if self.dtype is None else spelled(self.dtype)
        if dtype == "":
            raise ValueError("dtype is an empty text: name a type, as float16")
        return Changes(**{**given, "rename": tuple(rules), "strip_prefix": (), "add_prefix": (), "dtype": dtype})

    @property
    def makes_folder(self) -> bool:
        """Whether the target is a folder rather than a file."""
        return self.form == "dcp" or self.max_shard_size is not None or self.cut is not None

    @property
    def joins(self) -> bool:
        """Whether the source is the slices of several ranks."""
        return bool(self.join) and self.cut is None


class ChangeOptions(TypedDict, total=False):
    """The fields of ``Changes`` as keywords, for type checkers: Python cannot derive this type from the other."""

    form: TargetForm | None
    max_shard_size: int | str | None
    optimizer_names: OptimizerNames | None
    to: DeviceTags | None
    key: str | None
    weights: WeightsChoice
    strip_module: bool
    strip_wrappers: bool
    strip_prefix: Sequence[str]
    add_prefix: Sequence[str]
    rename: Sequence[NameRule]
    include: Sequence[str]
    exclude: Sequence[str]
    drop: Sequence[str]
    dtype: str | Any | None
    keep_dtype: Sequence[str]
    saturate: bool
    break_quantized: bool
    dequantize: bool
    recipe: str | PathLike[str] | None
    reverse: bool
    recipe_arguments: Mapping[str, int]
    join: Sequence[str]
    cut: int | None
    expand_tied: bool
    drop_unsupported: bool
    allow_empty: bool
    allow_unmatched: bool
    allow_missing: bool
    keep_calls: bool
    set_metadata: Mapping[str, str]
    drop_metadata: Sequence[str]
    config_from: str | None
    model: str | None
    model_arguments: Mapping[str, object]


class MigrateOptions(ChangeOptions, total=False):
    """The same with ``like``, which means something else in ``save``."""

    like: str | PathLike[str] | None


def changes_of(given: Changes | None, options: Mapping[str, Any]) -> Changes:
    """
    Return the changes that were passed whole or as keywords.

    Raises:
        ValueError: Both were given, or there is no such form or choice of weights.
        TypeError: One is of another type.
    """
    if given is not None and options:
        raise ValueError(f"changes were given, and as keywords {', '.join(options)}: pass one or the other")
    changes = Changes(**options) if given is None else given
    check_arguments(Changes, changes._asdict())
    if not isinstance(changes.dtype, str | None) and "dtype" not in type(changes.dtype).__name__.lower():
        raise TypeError(f"dtype takes str | torch.dtype | None, not {type(changes.dtype).__name__}")
    return changes


def size_in_bytes(size: int | str) -> int:
    """
    Return how many bytes a size is: ``"5GB"`` counts in thousands, ``"5GiB"`` in steps of 1024.

    Raises:
        MigrationRefused: It is not a size, or less than one byte.
    """
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    nbytes = 0 if isinstance(size, str) else int(size)  # also a number of numpy
    if match:
        number, step, binary = match.groups()
        factor = (1024 if binary else 1000) ** (_STEPS.index(step.upper()) + 1 if step else 0)
        nbytes = int(float(number) * factor) if "." in number else int(number) * factor
    if nbytes < 1:
        raise MigrationRefused(
            f"not a size of shards: {size!r}", kind="not-a-size", hint="Sizes are written like '5GB' or '500MiB'."
        )
    return nbytes


def most_nbytes_of(changes: Changes) -> int | None:
    """Return the most bytes that a file of a folder may have; None if there is no limit."""
    return None if changes.max_shard_size is None else size_in_bytes(changes.max_shard_size)
