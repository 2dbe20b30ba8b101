"""
What names of files and folders mean, and which files of a folder may be its checkpoint.

    model.safetensors.index.json, model-00001-of-00003.safetensors       an index, and its shards
    model.fp16-00001-of-00002.safetensors, …                             shards without an index, of a variant
    pytorch_model.bin                                                    the same weights once more
    optimizer.pt, rng_state_0.pth                                        what trainers put beside weights

Names are hints: the content of the files is read later.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, TypeAlias

from ckptool.sources.paths import is_likely

Kind: TypeAlias = Literal["file", "index", "set", "folder"]

ADAPTER: Final = "adapter_config.json"
TRAINER: Final = "trainer_state.json"
"""What a Trainer writes into each folder that it saves into, after the weights."""
PIPELINE: Final = "model_index.json"
"""What diffusers writes beside the components of a pipeline."""
ENGINE: Final = re.compile(r"global_step\d+")
"""A folder of states of DeepSpeed's engine."""


OF_PROCESSES: Final = "that processes wrote, one each"


class Named(NamedTuple):
    """A row of the table: the meaning of a file or a folder whose whole name matches a pattern."""

    pattern: str
    role: str = ""
    """Its role; empty for what may be weights."""
    of: str = ""
    """The set that it is one file of, in words; empty if a file of this name is complete."""
    least: int = 2
    """Fewest files that are a set."""
    is_slice: bool = False
    """Whether such a file holds a part of the weights: it is not written as a model unless that is asked for."""
    with_file: str = ""
    """A file that has to exist, too."""
    key: str = ""
    """A key that each of these files contains, if they hold values."""
    facts: Mapping[str, str] = MappingProxyType({})
    """Entries of JSON to show, each with the word before it."""


TABLE: Final = (
    Named("(?i:optim.*)", "optimizer"),
    Named("(?i:(?:lr_)?scheduler.*)", "scheduler"),
    Named("(?i:(?:grad_)?scaler.*)", "scaler"),
    Named("(?i:(?:rng_state|random_states).*)", "rng"),
    Named("(?i:training_args.*)", "arguments"),
    Named("(?i:(?:train)?(?:sampler|dataloader|dl_state_dict).*)", "data"),
    Named("(?i:(?:custom_checkpoint|preprocessor).*)", "other"),
    Named(
        re.escape(ADAPTER),
        "adapter",
        facts={
            "peft_type": "",
            "base_model_name_or_path": "of",
            "r": "r",
            "lora_alpha": "alpha",
            "target_modules": "on",
        },
    ),
    Named(
        re.escape(TRAINER),
        "trainer",
        facts={"global_step": "step", "max_steps": "of", "epoch": "epoch", "best_model_checkpoint": "best"},
    ),
    Named(re.escape(PIPELINE), "pipeline", facts={"_class_name": ""}),
    Named(r"modules\.json", "modules"),
    Named(
        r"common\.pt",
        of="what Megatron-core keeps beside the pieces of tensors",
        least=1,
        with_file=".metadata",
        key="checkpoint_version",
    ),
    Named(
        r"meta\.pt",
        of="what Lightning keeps beside the pieces of tensors",
        least=1,
        with_file=".metadata",
        key="pytorch-lightning_version",
    ),
    Named(r".*\.distcp", of="of a torch.distributed.checkpoint", least=1, is_slice=True),
    Named(r"(?:(?:bf16_|fp16_)?zero_pp_rank_[0-9]+_)?mp_rank_[0-9_]+_(?:optim|model)_states\.pt", of="of DeepSpeed"),
    Named(r"layer_[0-9]+[\w-]*[-_]model_states\.pt", of="of DeepSpeed", is_slice=True),
    Named(r"model-rank-[0-9]+-part-[0-9]+\.safetensors", of="of vLLM's sharded state"),
    Named(r"(?:.*_)?rank_?[0-9]+(?:\.\w+)?\.(?:bin|pt|pth|ckpt)", of=OF_PROCESSES),
)
"""The first row that matches counts."""
_INDEX: Final = re.compile(r"(.+)\.index(?:\.([\w-]+))?\.json")
_SHARD: Final = re.compile(r"(.+?)-([0-9]{3,9})-of-([0-9]{3,9})((?:\.\w+)?\.\w+)")
_OF_RANK: Final = re.compile(r"(.*rank-[0-9]{1,5}-part-)(0|[1-9][0-9]{0,4})(\.safetensors)")
"""A shard of what one rank saved for vLLM: nothing says how many there are."""
_USUAL: Final = re.compile(
    r"((?:diffusion_|open_clip_)?(?:pytorch_)?model|adapter_model|pytorch_lora_weights)(_[0-9]{1,4})?(?:\.([\w-]+))?"
)
"""Usual names of weights, without the suffix: a name, a number where there are several models, a variant."""
_MOST_SHARDS: Final = 100_000
_FORMATS: Final = (".safetensors", ".bin")


class Candidate(NamedTuple):
    """A possible checkpoint of a folder."""

    name: str
    """Name of the file, the index, the folder, or the first shard that exists."""
    kind: Kind
    files: tuple[str, ...] = ()
    """The shards of a set, in order, with the missing ones; only those that exist, if ``total`` is absurd."""
    total: int = 1
    """How many shards the set has, by their names."""


class Twin(NamedTuple):
    """Files with the same weights as a candidate."""

    name: str
    of: str
    """The name of the candidate."""
    is_variant: bool
    """Whether its values are others: of another type, or averaged."""


class Choice(NamedTuple):
    """The possible checkpoints of a folder; if there are several, their content decides."""

    candidates: tuple[Candidate, ...]
    twins: tuple[Twin, ...] = ()
    strangers: tuple[str, ...] = ()
    """Files with names of checkpoints that are not checkpoints."""


@lru_cache(maxsize=1 << 12)
def named(name: str) -> Named:
    """Return the row of the table for a file or folder; an empty one if there is none."""
    return next((row for row in TABLE if re.fullmatch(row.pattern, name, re.DOTALL)), Named(""))


def role_of(name: str) -> str | None:
    """Return the role of a file or folder with this name, if it is something kept beside weights."""
    return named(name).role or None


def set_of(name: str, names: Sequence[str]) -> str:
    """Return the set that a file belongs to, in words, by the names in its folder; empty if they show none."""
    row = named(name)
    count = sum(named(one) is row for one in names)
    if not row.of or count < row.least or (row.with_file and row.with_file not in names):
        return ""
    if row.key:
        return row.of
    return f"one of {count:,} files {row.of}" if count > 1 else f"a file {row.of}"


def choose(files: Sequence[str]) -> Choice:
    """Return the files that could be the checkpoint of a folder: those with a usual name before all others."""
    found = list(candidates(files))
    usual: dict[tuple[str, str], list[_Usual]] = {}
    for one in found:
        named = _usual(one)
        if named is not None:
            usual.setdefault(named.weights, []).append(named)
    if not usual:
        return Choice(tuple(one for one in found if role_of(one.name) is None))
    chosen_ones: list[Candidate] = []
    twins: list[Twin] = []
    for same in usual.values():
        variants = {one.variant for one in same}
        if "" in variants:
            variants = {""}
        best = {variant: min(one.rank for one in same if one.variant == variant) for variant in variants}
        chosen = [one for one in same if best.get(one.variant) == one.rank]
        chosen_ones += (one.candidate for one in chosen)
        for twin in same:
            if twin not in chosen:
                kept = next((other for other in chosen if other.variant == twin.variant), chosen[0])
                twins.append(Twin(twin.candidate.name, kept.candidate.name, kept.variant != twin.variant))
    return Choice(tuple(chosen_ones), tuple(twins))


def has_weights(files: Sequence[str]) -> bool:
    """Return whether one of the files has a name that is usual for weights."""
    return any(_usual(one) is not None for one in candidates(files))


def shard_of(name: str) -> tuple[str, int, int, str] | None:
    """Return prefix, number, count of shards and ending in the name of a shard; None if it is not one."""
    match = _SHARD.fullmatch(name)
    return (match[1], int(match[2]), int(match[3]), match[4]) if match else None


def belongs_to(index: str, name: str) -> bool:
    """Return whether an index could name a shard: ``model.safetensors.index.json`` and ``model-00001-…``."""
    head, shard = _INDEX.fullmatch(index), _SHARD.fullmatch(name)
    if head is None or shard is None:
        return False
    stem, _, suffix = head[1].rpartition(".")
    variant = f".{head[2]}" if head[2] else ""
    return (shard[1], shard[4]) in ((f"{stem}{variant}", f".{suffix}"), (stem, f"{variant}.{suffix}"))


def unnamed(shards: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the files that are in the same sets as the ``shards`` of an index, and that it does not name."""
    sets = {(one[0], one[2:]) for one in map(shard_of, shards) if one is not None}
    return [name for name in names if name not in shards and (one := shard_of(name)) and (one[0], one[2:]) in sets]


def lacking(shards: Collection[str]) -> list[str]:
    """Return the first missing shard of each set among the ``shards`` of an index that is not complete."""
    return [
        next(
            name for number, name in _set(min(there.values()), range(0 not in there, count + 1)) if number not in there
        )
        for count, there in _sets(shards)
        if len(there) < count
    ]


def other_set(index: str, files: Sequence[str]) -> Candidate | None:
    """Return the one complete set of shards in a folder that fits the name of an index, or None."""
    own = [one for one in files if belongs_to(index, one)]
    found = [one for one in candidates(own) if one.kind == "set" and set(one.files) <= set(own)]
    return found[0] if len(found) == 1 else None


def candidates(files: Sequence[str]) -> Iterator[Candidate]:
    """Yield each index, each set of shards without one, and each other file that is likely a checkpoint."""
    heads = {name: match[1] for name in files if (match := _INDEX.fullmatch(name))}
    indexes = [name for name, of in heads.items() if is_likely(of) or of in ("model", "pytorch_model")]
    yield from (Candidate(name, "index") for name in indexes)
    of_ranks: dict[str, dict[int, str]] = {}
    shards: list[str] = []
    for name in files:
        of_rank = _OF_RANK.fullmatch(name)
        if of_rank is not None:
            of_ranks.setdefault(f"{of_rank[1]}#{of_rank[3]}", {})[int(of_rank[2])] = name
            continue
        if not is_likely(name) or name.startswith("."):
            continue
        shard = shard_of(name)
        if shard is None or shard[1] > shard[2]:
            yield Candidate(name, "file")
        elif not any(belongs_to(index, name) for index in indexes):
            shards.append(name)
    for pattern, there in of_ranks.items():
        count = max(there) + 1
        listed = tuple(pattern.replace("#", str(number)) for number in range(count))
        yield Candidate(there[min(there)], *(("set", listed, count) if count > 1 else ("file",)))
    for count, there in _sets(shards):
        first = there[min(there)]
        if count == 1:
            yield Candidate(first, "file")
        else:
            numbers = range(0 not in there, count + (0 not in there or count in there))  # some count from 0
            there = there if count > _MOST_SHARDS else dict(_set(first, numbers))
            yield Candidate(first, "set", tuple(there[number] for number in sorted(there)), count)


def _sets(names: Iterable[str]) -> Iterator[tuple[int, dict[int, str]]]:
    """Yield the number of shards of each set, by their names, and the given ones by their numbers."""
    sets: dict[tuple[str, int, str], dict[int, str]] = {}
    for name in names:
        if (one := shard_of(name)) is not None and one[1] <= one[2]:
            sets.setdefault((one[0], one[2], one[3]), {})[one[1]] = name
    yield from ((count, there) for (_, count, _), there in sets.items())


def _set(name: str, numbers: Iterable[int]) -> Iterator[tuple[int, str]]:
    match = _SHARD.fullmatch(name)
    assert match is not None  # the caller matched it
    for number in numbers:
        yield number, f"{match[1]}-{number:0{len(match[2])}}-of-{match[3]}{match[4]}"


class _Usual(NamedTuple):
    """A candidate with a usual name."""

    candidate: Candidate
    weights: tuple[str, str]
    """Which weights it is, by the name without suffix and variant."""
    variant: str
    rank: int
    """Preference among several formats of the same weights: the least is first."""


def _usual(one: Candidate) -> _Usual | None:
    """Return the meaning of the name of a candidate; None if it is not a usual one."""
    name, variant = one.name, ""
    if one.kind == "index":
        match = _INDEX.fullmatch(name)
        assert match is not None  # it is an index
        name, variant = match[1], match[2] or ""
    elif one.kind == "set":
        stem, _, _, ending = shard_of(name) or (name, 0, 0, "")
        name = stem + ending
    stem, _, suffix = name.rpartition(".")
    match = _USUAL.fullmatch(stem or name)
    if match is None:
        return None
    rank = _FORMATS.index(f".{suffix}") if f".{suffix}" in _FORMATS else len(_FORMATS)
    return _Usual(one, (match[1].replace("pytorch_model", "model"), match[2] or ""), variant or match[3] or "", rank)
