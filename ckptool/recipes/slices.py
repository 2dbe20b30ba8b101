"""
Slices of model parallelism: how ranks cut tensors, and their files joined to one checkpoint.

    GLOB=DIM         each rank has a slice along a dimension, in the order of the ranks
    GLOB=DIM/2       two tensors in one, of each of which a rank has a slice; DIM/8:2:2 where they are not of one size
    GLOB=DIM@WIDTH   rows of the whole have so many elements: a number, or as many as those of another tensor
    GLOB=same        every rank has all of it
    NAME             the rules of a program that writes such files, from its published code

Numbers may be expressions, as in recipes. No value is computed: ranges of bytes are joined, and cut.

The numbers in the names of files give the order of the ranks. A missing number is refused, and so is a name that some
ranks lack. Tensors that every rank must have are read, and compared; no others are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.contents import Contents, Group
from ckptool.checkpoints.parsed import Parsed, Shard, Traits
from ckptool.checkpoints.weights import WeightsChoice, choose
from ckptool.errors import MigrationRefused, about
from ckptool.formats import open_checkpoint
from ckptool.formats.directories.beside import named_by
from ckptool.formats.slices import ranks_said
from ckptool.formats.slices.numbering import numbers, set_of
from ckptool.limits import Limits
from ckptool.messages import counted, some
from ckptool.names.renaming import matches
from ckptool.pickles import nodes
from ckptool.recipes.apply import Move
from ckptool.recipes.find import settings_of
from ckptool.recipes.moves import Tensors, Value, chunks, concatenated, cut, plain, settled
from ckptool.recipes.recipe import Number, Recipe, value_of
from ckptool.sources.folder import FolderSource
from ckptool.sources.paths import MEGATRON, is_likely, is_remote
from ckptool.tensors.payloads import have_same_bytes
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import TensorInfo, identity

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
            fact = f"{name!r} is not a file of form {form!r}"
            raise MigrationRefused(fact, kind="slices-form", hint="Leave out `form=`.")
        return name if "." in name else name + suffix

    def numbers(self, given: Mapping[str, int], ranks: int) -> Value:
        """
        Return a function from the expressions in rules to their values.

        Raises:
            MigrationRefused: The ranks cannot have equal shares of something, so that some have copies.
        """
        for name in self.of.per_rank:
            if given.get(name, 0) % ranks:
                fact = f"{name} is {given[name]}, which {ranks} ranks do not share equally: some have copies"
                raise MigrationRefused(fact, kind="slices-shape")
        return value_of(Recipe(self.of.name, (), lets=self.of.lets), given)

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


def joined(rule: SliceRule, parts: Sequence[LazyTensor], value: Value) -> LazyTensor:
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
        if rule.dim is None and not have_same_bytes(first.info, other.info):
            fact = f"{first.name!r} is not the same in all ranks: its bytes differ in rank {rank}"
            raise MigrationRefused(fact, kind="slices-differ", hint="It may be cut, or not all files are of one save.")
    if rule.dim is None:
        return first
    # A tensor that every rank has whole would be joined to one twice as large, and fit nothing: two ranks show it.
    may_be_copies = len(first.shape) > 1 and all(one.shape == first.shape for one in parts[:2])
    if len(parts) > 1 and may_be_copies and not _is_constant(first) and have_same_bytes(first.info, parts[1].info):
        fact = f"{first.name!r} is the same in the first two ranks, and {rule.text} says that it is cut"
        raise MigrationRefused(fact, kind="slices-differ", hint="Where every rank has all of it, say GLOB=same.")
    rows = [_blocks(rule, one, value) for one in parts]
    return _together(rule, [block for column in zip(*rows, strict=True) for block in column])


def slices(rule: SliceRule, whole: LazyTensor, ranks: int, value: Value) -> Tensors:
    """
    Return the slice of a tensor for each rank.

    Raises:
        MigrationRefused: It cannot be cut by the rule.
    """
    if rule.dim is None:
        return [whole] * ranks
    rows = [chunks(block, rule.dim, ranks) for block in _blocks(rule, plain(whole), value)]
    return [_together(rule, column) for column in zip(*rows, strict=True)]


def refuse_width(rule: SliceRule, whole: LazyTensor, others: Mapping[str, LazyTensor], value: Value) -> None:
    """Raise MigrationRefused if the rows of a whole tensor have another length than in its rule."""
    if rule.width is None:
        return
    wanted = others[rule.width].shape[-1] if rule.width in others else value(rule.width)
    if whole.shape[-1:] != (wanted,):
        fact = f"{whole.name!r} would be {list(whole.shape)}, and {rule.width!r} says that its rows have {wanted:,}"
        named = [name for name in NAMED if rule.text not in NAMED[name].rules]
        hint = f"The last rank is missing, or it is cut in another way: there are the rules of {some(named, 8)}."
        raise MigrationRefused(fact, kind="slices-shape", hint=hint)


def _blocks(rule: SliceRule, tensor: LazyTensor, value: Value) -> Tensors:
    """Return the tensors that one consists of."""
    assert rule.dim is not None  # what is the same is not cut
    shares = [*map(value, rule.shares)]
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


def _is_constant(tensor: LazyTensor) -> bool:
    """Return whether the first elements are all the same: zeros, as before training, are no sign of a copy."""
    head = next(iter(tensor.chunks(_PIECE_NBYTES)), b"")
    itemsize = tensor.info.dtype.itemsize
    return head == head[:itemsize] * (len(head) // itemsize)


class SliceSet(NamedTuple):
    """How one program cuts the tensors of its models."""

    name: str = "join"
    rules: tuple[str, ...] = ()
    source: str = ""
    """The code that the rules come from."""
    files: str = ""
    """A pattern of the names of its files, with groups for the numbers of the rank and of a part of its tensors."""
    written: str = "rank{}"
    """Name of the file of a rank that is written; without a suffix, the form adds its own. Empty if none is written."""
    key: str | None = None
    """The key of the weights, where a file has several state dicts."""
    lets: Mapping[str, Number] = MappingProxyType({})
    """Numbers to use if no settings give them."""
    per_rank: tuple[str, ...] = ()
    """Numbers that all ranks must have an equal share of."""


def _meta(name: str, embedding: int) -> SliceSet:
    return SliceSet(
        name,
        (
            f"tok_embeddings.weight={embedding}@norm.weight",
            *(f"*.attention.{one}.weight=0" for one in ("wq", "wk", "wv")),
            "*.attention.wo.weight=1@norm.weight",
            "*.feed_forward.w1.weight=0",
            "*.feed_forward.w2.weight=1",
            "*.feed_forward.w3.weight=0",
            "*_norm.weight=same",
            "norm.weight=same",
            "rope.freqs=same",
            "output.weight=0",
        ),
        "https://github.com/meta-llama/llama, meta-llama/llama3; llama/model.py",
        r"consolidated\.(?P<rank>\d{2,3})\.(?:pth|pt|safetensors)",
        "consolidated.{:02}.pth",
        per_rank=("n_heads", "n_kv_heads"),
    )


def _each(names: str, how: str, ends: str = "weight bias") -> tuple[str, ...]:
    return tuple(f"*{name}.{end}={how}" for name in names.split() for end in ends.split())


_QKV: Final = "0/num_attention_heads:num_key_value_heads:num_key_value_heads"
NAMED: Final[Mapping[str, SliceSet]] = {
    "meta-llama": _meta("meta-llama", 1),  # Llama 1 and 2, Code Llama
    "meta-llama3": _meta("meta-llama3", 0),
    "metaseq": SliceSet(
        "metaseq",
        (
            *_each("embed_tokens", "0", "weight"),
            *_each(".qkv_proj", "0/3"),
            *_each(".q_proj .k_proj .v_proj .fc1 .ffn_layernorm", "0"),
            *_each(".out_proj", "1@decoder.layers.0.final_layer_norm.weight", "weight"),
            *_each(".fc2", "1", "weight"),
            *_each(".out_proj .fc2", "same", "bias"),
            *_each("layer_norm", "same"),
            "*embed_positions*=same",
            "*.version=same",
        ),
        "https://github.com/facebookresearch/metaseq; metaseq/scripts/reshard_mp.py",
        r".*model_part-(?P<rank>\d{1,4})\.pt",
        written="",
    ),
    "vllm": SliceSet(
        "vllm",
        (
            *_each(".embed_tokens lm_head", "0", "weight"),
            *_each(".qkv_proj", _QKV),
            *_each(".gate_up_proj", "0/2"),
            *_each(".o_proj", "1", "weight"),
            *_each(".mlp.down_proj", "1@intermediate_size", "weight"),
            *_each(".o_proj .down_proj", "same", "bias"),
            *_each("norm", "same"),
            "*.experts.w13_weight=1/2",
            "*.experts.w2_weight=2",
            *_each(".mlp.gate .block_sparse_moe.gate", "same", "weight"),
        ),
        "https://github.com/vllm-project/vllm; vllm/model_executor/layers/linear.py, fused_moe/layer.py",
        r"model-rank-(?P<rank>\d{1,4})-part-(?P<part>\d{1,5})\.safetensors",
        "model-rank-{}-part-0.safetensors",
        lets=MappingProxyType({"num_key_value_heads": "num_attention_heads"}),
        per_rank=("num_attention_heads", "num_key_value_heads"),
    ),
    "megatron": SliceSet(
        "megatron",
        (
            *_each("word_embeddings output_layer", "0", "weight"),
            *_each("position_embeddings router", "same", "weight"),
            *_each(".query_key_value .linear_qkv", "0"),
            *_each(".dense_h_to_4h .linear_fc1", "0/1 + swiglu"),
            *_each("attention.dense .linear_proj .dense_4h_to_h .linear_fc2", "1", "weight"),
            *_each("attention.dense .linear_proj .dense_4h_to_h .linear_fc2", "same", "bias"),
            *_each("norm", "same"),
            "*.layer_norm_weight=same",
            "*.layer_norm_bias=same",
        ),
        "https://github.com/NVIDIA/Megatron-LM; tools/checkpoint/loader_base.py",
        r"mp_rank_(?P<rank>\d{2,4})/model_(?:optim_)?rng\.pt",
        written="",
        key="model",
    ),
}


NAME: Final = "slices"
_ALL_RANKS: Final = "Get the files of all ranks."
_TRAITS: Final = Traits(keeps_versions=False)
_SAID: Final = re.compile(r"(?:\d[._-]?of|world[._-]?size)[._-]?0*(\d{1,6})(?=[\W_])", re.IGNORECASE)
"""The number of files, in their names."""
_FROM_ZERO: Final = re.compile(r"(?:^|[\W_])(?:rank|tp|mp)(?:[._-]?rank)?[._-]?0*1(?!\d)", re.IGNORECASE)
"""The number of a second rank, in names that begin at 0."""


class Joined(NamedTuple):
    """The checkpoint that slices make up, and how each of its tensors was made."""

    checkpoint: Checkpoint
    moves: tuple[Move, ...]
    notes: tuple[str, ...]


def open_joined(
    path: str, rules: SliceRules, key: str | None, which: WeightsChoice, given: Mapping[str, int], limits: Limits
) -> Joined:
    """
    Open the files of all ranks in a folder, or of the set that one file belongs to, as one checkpoint of their weights.

    Raises:
        MigrationRefused: Some are missing, or are not slices by the rules.
        CkptoolError: One cannot be read, or it is not clear which weights are meant.
    """
    if is_remote(path):
        raise MigrationRefused("slices of ranks are joined from a folder that is here", kind="far-slices", path=path)
    place = path
    for _ in range(0 if os.path.isdir(path) else 1 + rules.of.files.count("/")):
        place = os.path.dirname(place) or os.curdir
    folder = FolderSource(place, limits.cancellation)
    try:
        if last := named_by(folder, MEGATRON):  # the last save
            place = folder.place_of(last)
            folder.close()
            folder = FolderSource(place, limits.cancellation)
        with about(path):
            names = [*folder.files, *(f"{one}/{name}" for one in folder.folders for name in folder.names(one)[0])]
            files = _files(names, rules, None if os.path.isdir(path) else os.path.relpath(path, place))
            opened: list[list[Checkpoint]] = []
            for own in files:
                opened.append([])
                for name in own:
                    one = open_checkpoint(folder.place_of(name), limits=limits)
                    folder.adopt(one.source)
                    one.check_index()
                    opened[-1].append(one)
            ranks, (beside, *_) = zip(*(_rank(own, key or rules.of.key, which) for own in opened), strict=True)
            first = opened[0][0]
            if (said := ranks_said(first.root)) > len(ranks):
                raise MigrationRefused(
                    f"{files[0][0]!r} says that there are {said:,} ranks, and {len(ranks):,} are there",
                    kind="missing-rank",
                    hint=_ALL_RANKS,
                )
            args = nodes.item(first.root, "args")  # those of the training, if the file has them; True is 1
            pairs = nodes.mapping_pairs(args) or nodes.attribute_pairs(args) or []
            said_there = {name: int(one) for name, one in pairs if isinstance(name, str) and isinstance(one, int)}
            infos, moves = _whole(ranks, files, rules, {**said_there, **settings_of(first), **given})
        contents = Contents(infos)
        contents.groups.append(Group("", "mapping", list(infos)))
        named = zip(chain(*files), chain(*opened), strict=True)
        shards = [Shard(name, len(one.tensors), one.file_nbytes, one.source) for name, one in named]
        parsed = Parsed(folder, NAME, _TRAITS, contents, fixed_form="state_dict", shards=tuple(shards))
        notes = (f"what is beside the weights of the ranks is left out: {some(beside)}",) if beside else ()
        return Joined(Checkpoint(place, folder, parsed), tuple(moves), notes)
    except BaseException:
        folder.close()
        raise


def _files(names: Sequence[str], rules: SliceRules, given: str | None) -> list[list[str]]:
    """Return the files of each rank, in the order of the ranks; if a file is given, those of its set."""
    if rules.of.files:
        return _of_program([one for one in names if given is None or numbers(one)[0] == numbers(given)[0]], rules)
    likely = [name for name in names if is_likely(name)]
    sets = {tuple(found.files): found for found in (set_of(one, likely) for one in likely) if found.nearest}
    if given is not None:
        sets = {files: found for files, found in sets.items() if given in files}
    if len(sets) != 1:
        what = f"{len(sets):,} sets of files, of {some([repr(one[0]) for one in sets])}" if sets else "no files"
        hint = "Give the path of one of those that are meant." if sets else None
        raise MigrationRefused(f"{what} that are numbered as ranks are", kind="no-ranks", hint=hint)
    ((files, found),) = sets.items()
    said = _SAID.search(files[0])
    if found.gap or (said and int(said[1]) != len(files)):
        fact = f"{len(files):,} of {int(said[1]) if said else found.total:,} ranks there{found.gap}"
        raise MigrationRefused(fact, kind="missing-rank", hint=_ALL_RANKS)
    if _FROM_ZERO.search(files[0]):
        raise MigrationRefused(f"there is no rank 0 before {files[0]!r}", kind="missing-rank", hint=_ALL_RANKS)
    if len(found.nearest) > 1:
        fact = f"{files[0]!r} to {files[-1]!r} have two numbers each: only one kind of parallelism can be joined"
        raise MigrationRefused(fact, kind="no-ranks")
    return [[name] for name in files]


def _of_program(names: Sequence[str], rules: SliceRules) -> list[list[str]]:
    found: dict[int, dict[int, str]] = {}
    for match in filter(None, (re.fullmatch(rules.of.files, name) for name in names)):
        groups = match.groupdict()
        parts = found.setdefault(int(groups["rank"]), {})
        twin = parts.setdefault(int(groups.get("part", 0)), match[0])
        if twin != match[0]:
            hint = "Give the path of one of those that are meant."
            raise MigrationRefused(f"{twin!r} and {match[0]!r} are of one rank", kind="no-ranks", hint=hint)
    if len(found) < 2:
        own = some([name for parts in found.values() for name in parts.values()]) or "none"
        fact = f"slices of {rules.of.name!r} are several files, and of their names there is {own}"
        raise MigrationRefused(fact, kind="no-ranks", hint="Give the folder with the files of all ranks.")
    for what, there in (("rank", [*found]), *((f"part of rank {rank}", [*found[rank]]) for rank in sorted(found))):
        if gone := [str(number) for number in range(max(there)) if number not in there]:
            fact = f"there is no {what} {some(gone)}, and there are {len(there):,} others"
            raise MigrationRefused(fact, kind="missing-rank", hint=_ALL_RANKS)
    return [[parts[number] for number in sorted(parts)] for _, parts in sorted(found.items())]


def _rank(
    files: Sequence[Checkpoint], key: str | None, which: WeightsChoice
) -> tuple[dict[str, LazyTensor], list[str]]:
    """Return the weights in the files of one rank, and the paths of what else is in them."""
    found: dict[str, LazyTensor] = {}
    beside: list[str] = []
    for one in files:
        with about(one.path):
            chosen = choose(one, key, which)
        if twins := [name for name in chosen if name in found]:
            raise MigrationRefused(f"{twins[0]!r} is in two files of one rank", kind="slices-overlap")
        found |= chosen
        paths = (*one.tensors, *(path for path, _ in one.extras))
        beside += [path for path in paths if path.removeprefix(chosen.head) not in chosen]
    return found, beside


def _whole(
    ranks: Sequence[Mapping[str, LazyTensor]],
    files: Sequence[Sequence[str]],
    rules: SliceRules,
    given: Mapping[str, int],
) -> tuple[dict[str, TensorInfo], list[Move]]:
    """Return the whole tensors, and the moves that made them; names that are tied in each rank stay tied."""
    first = ranks[0]
    for one, two in chain.from_iterable(((0, other), (other, 0)) for other in range(1, len(ranks))):
        if lacking := [name for name in ranks[one] if name not in ranks[two]]:
            here, there = (some([os.path.basename(name) for name in files[rank]]) for rank in (two, one))
            fact = f"{here!r} has no {some(list(map(repr, lacking)))}, and {there!r} has"
            raise MigrationRefused(fact, kind="slices-missing", hint="Are all of one save, and slices?")
    value = rules.numbers(given, len(ranks))
    wholes: dict[object, LazyTensor] = {}
    infos, moves = {}, []
    for name, rule in rules.by_name(first).items():
        parts = [one[name] for one in ranks]
        place = (*map(identity, (one.info for one in parts)), rule.dim, rule.shares)
        if place not in wholes:
            wholes[place] = joined(rule, parts, value)
        whole = LazyTensor(name, wholes[place].info)
        refuse_width(rule, whole, first, value)
        infos[name] = whole.info
        if rule.dim is not None:
            sides = tuple((name, one.shape) for one in parts), ((name, whole.shape),)
            moves.append(Move(f"join {rule.text.rpartition('=')[2]}", *sides))
    return infos, moves
