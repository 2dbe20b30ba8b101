"""
The content of the files of an engine of DeepSpeed, as data: ``*_model_states.pt`` and ``*_optim_states.pt``.

See runtime/engine.py, ``_save_checkpoint``, and the ``state_dict`` of each optimizer in runtime/zero/.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final

from ckptool.checkpoints.parsed import Parsed
from ckptool.errors import MalformedFile
from ckptool.formats.directories.side_by_side import agree
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Inert, Pairs
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.rebuild import as_sizes
from ckptool.tensors.tensor import TensorInfo, is_size

MODEL_FILE: Final = re.compile(r"(?:[a-z0-9]{1,8}_)?(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
OPTIM_FILE: Final = re.compile(r"(?:[a-z0-9]{1,8}_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
LAYER_FILE: Final = re.compile(r"layer_(\d{1,6})-(?:model_(\d{1,6})-)?model_states\.pt")
EXPERT_FILE: Final = re.compile(r"(?:layer_(\d{1,6})_)?expert_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt")

_STRUCTURE: Final = frozenset(
    (
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
    )
)
"""Keys of model states that are about tensors; the rest is the engine's state, and the client's."""
_OF_PARTITION: Final = frozenset(
    (
        "single_partition_of_fp32_groups",
        "fp32_flat_groups",
        "base_optimizer_state",
        "optimizer_state_dict",
        "group_paddings",
        "param_alignment_paddings",
        "param_slice_mappings",
        "partition_count",
        "zero_stage",
        "ds_version",
        "ds_config",
    )
)

_MOST_SETTINGS: Final = 200


class _File:
    """A file of a rank, and the pairs of its outermost mapping."""

    def __init__(self, name: str, parsed: Parsed) -> None:
        self.name = name
        self.parsed = parsed
        self.pairs: Pairs = nodes.mapping_pairs(parsed.root) or []
        if parsed.rebuilder is None or not self.pairs:
            raise self.malformed(f"it holds {nodes.class_name(parsed.root)} and no states of an engine")
        self.rebuilder = parsed.rebuilder

    def field(self, key: str) -> Inert:
        """Return what is under a key; None if nothing is."""
        return nodes.lookup(self.pairs, key)

    def number(self, key: str) -> int | None:
        """Return the number under a key."""
        return _size_or_enum(self.field(key))

    @property
    def version(self) -> str | None:
        """The release of DeepSpeed that wrote it."""
        found = self.field("ds_version")
        return found if isinstance(found, str) and len(found) < 64 else None

    @cached_property
    def settings(self) -> dict[str, str | float]:
        """The settings of the engine, which it writes into every file: numbers and words, two levels deep."""
        found: dict[str, str | float] = {}
        for key, value in (nodes.mapping_pairs(self.field("ds_config")) or [])[:_MOST_SETTINGS]:
            for own, leaf in (nodes.mapping_pairs(value) or [("", value)])[:_MOST_SETTINGS]:
                if isinstance(key, str) and isinstance(own, str) and isinstance(leaf, str | int | float):
                    found[f"{key}.{own}".rstrip(".")] = leaf
        return found

    def malformed(self, what: str) -> MalformedFile:
        """Return the error for a file that contradicts itself."""
        return MalformedFile(f"{self.name!r}: {what}", kind="malformed-states", hint="Get the file again.")

    def shapes(self, node: Inert, what: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes in a mapping, by name."""
        found: dict[str, tuple[int, ...]] = {}
        for name, size in nodes.mapping_pairs(node) or []:
            if type(name) is not str or name in found:
                raise self.malformed(f"{what} has a name twice, or one that is no text")
            try:
                found[name] = as_sizes(size)
            except MalformedFile as error:
                raise self.malformed(f"{what} has no shape for {name!r}") from error
        return found


class ModelStates(_File):
    """``*_model_states.pt``."""

    @cached_property
    def module(self) -> dict[str, TensorInfo] | None:
        """The tensors of ``module`` by name; None where it has none, as for pipelines."""
        if self.field("module") is None:
            return None
        tensors = self.parsed.contents.tensors
        return {name[len("module.") :]: info for name, info in tensors.items() if name.startswith("module.")}

    @cached_property
    def groups(self) -> list[dict[str, tuple[int, ...]]] | None:
        """The shapes of the parameters that are trained, for each group of the optimizer; None for stage 0."""
        said = self.field("param_shapes")
        if said is None:
            return None
        return [self.shapes(group, "param_shapes") for group in (said if isinstance(said, list) else [said])]

    @cached_property
    def frozen(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters that are not trained, where they are kept apart."""
        return self.shapes(self.field("frozen_param_shapes"), "frozen_param_shapes")

    @cached_property
    def fragments(self) -> dict[str, TensorInfo]:
        """This rank's parts of the parameters that are not trained."""
        pairs = nodes.mapping_pairs(self.field("frozen_param_fragments")) or []
        found = ((name, self.rebuilder.tensor(node)) for name, node in pairs if type(name) is str)
        return {name: info for name, info in found if info is not None}

    @cached_property
    def shared(self) -> dict[str, str]:
        """Names whose parameter is stored under another name, with that name."""
        pairs = nodes.mapping_pairs(self.field("shared_params")) or []
        return {name: kept for name, kept in pairs if type(name) is str and type(kept) is str}

    @cached_property
    def buffers(self) -> frozenset[str]:
        """The names of the buffers in ``module``."""
        said = self.field("buffer_names")
        return frozenset(name for name in said if type(name) is str) if isinstance(said, list) else frozenset()

    def client(self) -> Iterator[tuple[str, Inert]]:
        """Yield what is not about tensors: steps, the scheduler, what the client added."""
        for key, value in self.pairs:
            if type(key) is str and key not in _STRUCTURE and value is not None:
                yield key, value


class OptimStates(_File):
    """``*_optim_states.pt``: what one data-parallel rank keeps of the optimizer."""

    def __init__(self, name: str, parsed: Parsed) -> None:
        super().__init__(name, parsed)
        inner = nodes.mapping_pairs(self.field("optimizer_state_dict"))
        if inner is None:
            raise self.malformed("no optimizer_state_dict")
        self.inner = inner
        self.of_stage_3 = nodes.lookup(inner, "fp32_flat_groups") is not None

    @property
    def stage(self) -> int:
        """The stage of ZeRO, which decides what was partitioned."""
        said = _size_or_enum(nodes.lookup(self.inner, "zero_stage"))
        return said if said is not None else 3 if self.of_stage_3 else 2

    @property
    def counts(self) -> tuple[int, ...]:
        """Into how many parts each group was partitioned; empty if the file does not record it."""
        said = nodes.lookup(self.inner, "partition_count")
        listed = said if isinstance(said, list) else [said]
        return tuple(one for one in map(_size_or_enum, listed) if one is not None)

    @cached_property
    def flats(self) -> list[TensorInfo]:
        """The flat tensors of float32 masters: one for each group, or for each sub-group of stage 3."""
        key = "fp32_flat_groups" if self.of_stage_3 else "single_partition_of_fp32_groups"
        said = nodes.lookup(self.inner, key)
        if not isinstance(said, list):
            raise self.malformed(f"no {key}")
        return [self._flat(node, f"{key}.{index}") for index, node in enumerate(said)]

    def _flat(self, node: Inert, what: str) -> TensorInfo:
        info = self.rebuilder.tensor(node)
        if info is None or len(info.shape) != 1 or not is_plain(info):
            raise self.malformed(f"{what} is no flat tensor")
        return info

    @cached_property
    def alignments(self) -> list[list[int]] | None:
        """How many elements of padding follow each parameter, by group; None where none does."""
        said = nodes.lookup(self.inner, "param_alignment_paddings")
        if said is None:
            return None
        if not isinstance(said, list) or not all(isinstance(one, list) and all(map(is_size, one)) for one in said):
            raise self.malformed("param_alignment_paddings are no sizes")
        return said

    @cached_property
    def slices(self) -> list[frozenset[str]] | None:
        """The parameters of which the file says that it has parts, by group; None if it does not say."""
        said = nodes.lookup(self.inner, "param_slice_mappings")
        if not isinstance(said, list) or len(said) != len(self.flats):
            return None
        return [frozenset(name for name, _ in nodes.mapping_pairs(one) or [] if type(name) is str) for one in said]

    @cached_property
    def _base(self) -> Pairs:
        key = "optimizer_state_dict" if self.of_stage_3 else "base_optimizer_state"
        return nodes.mapping_pairs(nodes.lookup(self.inner, key)) or []

    @cached_property
    def state(self) -> dict[int, dict[str, Inert]]:
        """What the optimizer keeps of each flat tensor, by its number."""
        found: dict[int, dict[str, Inert]] = {}
        for index, values in nodes.mapping_pairs(nodes.lookup(self._base, "state")) or []:
            if type(index) is int and 0 <= index < len(self.flats):
                pairs = nodes.mapping_pairs(values) or []
                found[index] = {key: value for key, value in pairs if type(key) is str}
        return found

    @property
    def param_groups(self) -> Inert:
        """The settings of the optimizer, by group."""
        return nodes.lookup(self._base, "param_groups")

    def steps(self) -> dict[int, float]:
        """Return how often each flat tensor was stepped, if the file records it. Reads a number for each."""
        found = {}
        for index, values in self.state.items():
            step = values.get("step")
            info = self.rebuilder.tensor(step)
            if info is not None and info.dtype.name in ("float32", "int64") and info.numel == 1 and is_plain(info):
                data = memoryview(LazyTensor("step", info).read())
                step = data.cast("f" if info.dtype.name == "float32" else "q")[0]
            if isinstance(step, int | float):
                found[index] = step
        return found

    def others(self) -> Iterator[tuple[str, Inert]]:
        """Yield what the optimizer keeps that is not partitioned."""
        for key, value in self.inner:
            if type(key) is str and key not in _OF_PARTITION:
                yield key, value


def is_plain(info: TensorInfo) -> bool:
    """Return whether the elements of a tensor are in the file unchanged and consecutive."""
    return info.storage is not None and info.layout == "strided" and info.is_contiguous


def _size_or_enum(node: Inert) -> int | None:
    """Return a number, or the number that a member of an enum is made from."""
    if isinstance(node, Call) and isinstance(node.args, tuple) and len(node.args) == 1:
        node = node.args[0]
    return node if is_size(node) else None


def steps_agree(files: Sequence[OptimStates]) -> None:
    """Raise MalformedFile if the ranks' parts of the optimizer were stepped a different number of times."""
    steps = [(one.name, one.steps()) for one in files]
    for index in steps[0][1]:
        agree("steps of the optimizer", [(name, found.get(index)) for name, found in steps])
