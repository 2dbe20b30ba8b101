"""``Checkpoint``: what ``open_checkpoint`` returns, the tensors of an open file by name and everything else in it."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import replace
from functools import cached_property, wraps
from itertools import islice
from typing import Any, Final, NoReturn, TypeVar

from ckptool.checkpoints.modules import StateDictWalk
from ckptool.checkpoints.parsed import Parsed
from ckptool.checkpoints.roles import WEIGHT_KEYS, Role, choose_weights, is_explained, is_generator, role_of
from ckptool.errors import DamagedFile, UnsupportedFeature
from ckptool.messages import show_nbytes
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Global, Inert
from ckptool.pickles.values import plain_value
from ckptool.sources.source import Closing, Source, remote_under
from ckptool.tensors.reading import LazyTensor, announce
from ckptool.tensors.tensor import distinct, identity

_T = TypeVar("_T")
_PUBLIC: Final = (
    *("path", "member", "format", "form", "file_nbytes", "metadata", "globals", "class_sources", "release_tree"),
    *("tensors", "attributes", "weights", "state_dicts", "extras", "shards", "beside", "members", "inside"),
    *("check_index", "check_unchanged", "close", "is_folder", "keys"),
)
"""Names that a prompt completes: those for users; other attributes are for this package."""
_MOST_ALIKE: Final = 8
"""How many state dicts with equal beginnings another one is compared with."""


def once(work: Callable[[Checkpoint], _T]) -> Callable[[Checkpoint], _T]:
    """Decorate a function of a checkpoint so that its result is computed once and kept with the checkpoint."""

    @wraps(work)
    def known(checkpoint: Checkpoint) -> _T:
        if work not in checkpoint.facts:
            checkpoint.facts[work] = work(checkpoint)
        found: _T = checkpoint.facts[work]
        return found

    return known


class ByName(dict[str, LazyTensor]):
    """Tensors by name. ``d[name]`` raises a KeyError with the most similar name; ``get`` and ``in`` are a dict's."""

    def __missing__(self, name: object) -> NoReturn:
        from ckptool.names.renaming import Missing  # few names are missing

        raise KeyError(Missing(name, self) if isinstance(name, str) else name)


class StateDict(Mapping[str, LazyTensor]):
    """A mapping of names to tensors found inside a checkpoint. Names are relative to ``key``; order is the file's."""

    def __init__(
        self,
        key: str,
        role: Role,
        tensors: dict[str, LazyTensor],
        class_name: str | None,
        node: Inert = None,
        own_keys: frozenset[str] | None = None,
        parts: tuple[StateDict, ...] = (),
    ) -> None:
        self.key = key
        """Its full dotted path; empty for the root."""
        self.role: Role = role
        self.class_name = class_name
        """The model's class, if the file contains the whole model."""
        self.node = node
        """The mapping or model in the pickled tree; None if the format has no tree."""
        self.own_keys = own_keys
        """The keys of the mapping that belong to it; None if all do."""
        self.parts = parts
        """The state dicts that it joins, if it was put together from several."""
        self._tensors = ByName(tensors)

    @property
    def head(self) -> str:
        """The prefix of its full names: its key and a dot; empty at the root."""
        return f"{self.key}." if self.key else ""

    @property
    def numel(self) -> int:
        """The number of elements of all its tensors; tied ones count once."""
        return sum(info.numel for info in distinct([tensor.info for tensor in self._tensors.values()]))

    def __getitem__(self, name: str) -> LazyTensor:
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def items(self) -> ItemsView[str, LazyTensor]:
        return self._tensors.items()

    def values(self) -> ValuesView[LazyTensor]:
        return self._tensors.values()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __dir__(self) -> Iterable[str]:
        return ("key", "role", "class_name", "numel", "keys", "values", "items", "get")

    def __repr__(self) -> str:
        return f"<StateDict {self.key!r} {self.role} of {len(self)} tensors>"

    def _repr_html_(self) -> str:
        return _html(repr(self), self._tensors)


class Checkpoint(Parsed, Closing):
    """
    What is in one file, or in files that belong together. Tensors are lazy: their bytes are read when
    ``LazyTensor.read`` is called.

    Nothing changes after opening (but see ``release_tree``), so threads may share one. It keeps its file open until
    ``close()``, or until the end of a ``with`` block.
    """

    def __init__(self, path: str, source: Source, parsed: Parsed) -> None:
        self.__dict__.update(parsed.__dict__)
        self.facts: dict[Callable[[Checkpoint], Any], Any] = {}
        """Results of functions decorated with ``once``."""
        self.path = path
        self.source = source
        self.fixed_form = parsed.form
        contents = parsed.contents
        self.contents = replace(contents, tensors={}, groups=[], attributes={}, extras=[])  # it has these itself
        self.inside: Mapping[str, Checkpoint] = {
            name: Checkpoint("", one.source, one) for name, one in parsed.inside.items()
        }
        self.tensors: dict[str, LazyTensor] = ByName(
            {name: LazyTensor(name, info) for name, info in contents.tensors.items()}
        )
        """Every tensor by full dotted name, in file order; a tied one has an entry for each name."""
        self.attributes = {
            name: LazyTensor(name, info) for name, info in (contents.attributes | dict(self.constants)).items()
        }
        """Tensors inside whole models that a state_dict() would not give: plain attributes, non-persistent buffers."""
        self.extras: tuple[tuple[str, Inert], ...] = tuple(contents.extras)
        """Everything that is not a tensor: the largest subtrees without tensors, by path."""
        self.state_dicts = tuple(
            StateDict(
                one.key,
                role_of(one, contents),
                {name[len(one.head) :]: self.tensors[name] for name in one.names},
                *(one.class_name, one.node, one.own_keys),
            )
            for one in contents.groups
            if one.names
        )
        self._is_open = True

    def __getitem__(self, key: object) -> Any:
        """
        Return the value of a key at the top of the file, one of ``keys()``: a tensor as a ``LazyTensor``, weights as a
        ``StateDict``, and anything else as plain values of Python, with lazy tensors in them. The value of a namespace
        is a dict of its attributes. An object that only code could make stays a node, which names its class. The full
        name of a tensor, as in ``tensors``, gives that tensor.

        Raises:
            KeyError: There is no such key; the message has the most similar one.
            LimitExceeded: The value is nested too deep, or too large.
        """
        top = self._top
        if key not in top:
            if key in self.tensors:
                return self.tensors[str(key)]
            from ckptool.names.renaming import Missing

            if not isinstance(key, str):
                raise KeyError(key)
            raise KeyError(Missing(key, self.tensors if "." in key else [one for one in top if isinstance(one, str)]))
        node = top[key]
        if isinstance(node, LazyTensor):
            return node
        weights = next((one for one in self.state_dicts if one.key == str(key) and one.node is node), None)
        is_all = weights is not None and len(weights) == len(nodes.mapping_pairs(node) or ())
        if weights is not None and (weights.role in ("model", "ema") or is_all):
            return weights
        rebuilder, names = self.rebuilder, dict[int, LazyTensor]()
        info = rebuilder.tensor(node) if rebuilder is not None else None
        if info is not None:
            return self.tensors.get(str(key)) or LazyTensor(str(key), info)

        def leaf(inner: Inert) -> LazyTensor | None:
            info = rebuilder.tensor(inner) if rebuilder is not None else None
            if info is not None and not names:
                names.update((id(tensor.info), tensor) for tensor in self.tensors.values())
            return None if info is None else names.get(id(info)) or LazyTensor(str(key), info)

        try:
            return plain_value(node, leaf, self.source.cancellation, _attributes_or_node)
        except UnsupportedFeature:  # a key that only code could make
            return node

    def __contains__(self, key: object) -> bool:
        return key in self._top or key in self.tensors

    def __iter__(self) -> Iterator[Any]:
        return iter(self._top)

    def keys(self) -> KeysView[Any]:
        """Return the keys at the top of the file, in its order; the names of tensors if it has nothing else."""
        return self._top.keys()

    @cached_property
    def _top(self) -> Mapping[Any, Inert]:
        """Return the values at the top by key: nodes of the tree, or tensors."""
        pairs = nodes.mapping_pairs(self.root)
        if isinstance(self.root, list | tuple):
            pairs = list(enumerate(self.root))
        if pairs is None or not self.traits.has_tree:
            return self.tensors
        return {key if isinstance(key, str | int) else nodes.class_name(key): value for key, value in pairs}

    def __setattr__(self, name: str, value: object) -> None:
        if "_is_open" in self.__dict__:
            raise AttributeError(f"a checkpoint does not change after opening: {name!r} cannot be set")
        super().__setattr__(name, value)

    @property
    def globals(self) -> tuple[Global, ...]:
        """Every name that unpickling would import, in order of first use. None was imported."""
        found: dict[tuple[str, str], Global] = {}
        for stream in self.streams:
            for one in stream.globals:
                found.setdefault((one.module, one.name), one)
        return tuple(found.values())

    @cached_property
    def weights(self) -> StateDict | None:
        """The state dict with the model's weights, or None if there is none, or several could be."""
        if self.unmerged is not None:
            return None
        # Of copies, the one under the best known key counts, which may be a later one; only then the first of each set.
        chosen = _most_likely(self.state_dicts)
        chosen = chosen or _most_likely([one for one in self.state_dicts if one.key not in self.copies])
        if chosen is None or chosen.key.rpartition(".")[2] in WEIGHT_KEYS or not self.unexplained_beside(chosen):
            return chosen
        return None

    def unexplained_beside(self, chosen: StateDict) -> dict[str, int]:
        """
        Return what else may be weights of the model, with its number of elements: state dicts by key, and other tensors
        by name, which are not in the chosen one and whose names do not show another purpose.
        """
        if len(chosen) == len(self.tensors):
            return {}
        taken = {identity(tensor.info) for tensor in chosen.values() if tensor.info.numel}
        inside = chosen.head if chosen.own_keys is None else "\0"  # all below its key belongs to it
        above = {key for one in self.state_dicts for key in paths_above(one.key)}
        named: set[str] = set()
        found: dict[str, int] = {}
        for one in self.state_dicts:
            is_mixed = one.key in above and one.key != chosen.key and one.class_name is None
            if is_mixed and one.role in ("model", "other"):  # tensors among other things, judged one by one below
                continue
            named.update(one.head + name for name in one)
            is_known = one.role != "model" or one.key == chosen.key or one.key.startswith(inside)
            is_known = is_known or is_explained(one.key, list(one))
            if not is_known and any(identity(tensor.info) not in taken for tensor in one.values()):
                found[one.key] = one.numel
        for name, tensor in self.tensors.items():
            is_known = name in named or name.startswith(inside) or is_generator(tensor.info) or is_explained(name)
            if not is_known and identity(tensor.info) not in taken:
                found[name] = tensor.info.numel
        return found

    @cached_property
    def copies(self) -> Mapping[str, str]:
        """Keys of state dicts with the same entries, in the same memory, as an earlier one; and the key of that one."""
        firsts: dict[tuple[object, ...], list[StateDict]] = {}
        found: dict[str, str] = {}
        for one in self.state_dicts:
            infos = [tensor.info for tensor in islice(one.values(), 1)]
            begin = [identity(info) for info in infos if info.numel]
            alike = firsts.setdefault((one.role, one.class_name, len(one), *begin, next(iter(one), None)), [])
            first = next((other for other in alike[:_MOST_ALIKE] if _is_same(one, other)), None)
            if first is None:
                alike.append(one)
            else:
                found[one.key] = first.key
        return found

    def also_under(self, key: str) -> tuple[str, ...]:
        """Return the other keys that have the same state dict as ``key``."""
        first = self.copies.get(key, key)
        return tuple(
            one.key for one in self.state_dicts if one.key != key and self.copies.get(one.key, one.key) == first
        )

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of several files without an index of the others."""
        return self.source.is_folder

    def check_unchanged(self) -> None:
        """Raise SourceChanged if the file, or a shard of it, was written to since it was opened."""
        self.source.check_unchanged()

    def announce(self, tensors: Iterable[LazyTensor]) -> None:
        """Announce which tensors will be read next: from remote files, their bytes are fetched ahead."""
        if any(remote_under(source) for source in (self.source, *(shard.source for shard in self.shards))):
            announce(tensors)

    def check_index(self) -> None:
        """Raise DamagedFile if the index does not match its own checksum."""
        if self.damage:
            raise DamagedFile(self.damage, hint="Download the file again.")

    def release_tree(self) -> None:
        """
        Free the pickled tree, for long-lived checkpoints: the only change after opening. Tensors stay readable, and are
        all that is left at the top.
        """
        self.contents.walks = []
        self.__dict__.update(root=None, pickles=(), rebuilder=None, extras=(), inside={})
        self.__dict__.pop("_top", None)
        for state_dict in self.state_dicts:
            state_dict.node = None

    def close(self) -> None:
        """Close the file. Tensors that were not read yet cannot be read any more."""
        self.__dict__["_is_open"] = False
        self.source.close()

    def __dir__(self) -> Iterable[str]:
        return _PUBLIC

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path!r} {self.format} {self.form} of {len(self.tensors)} tensors>"

    def __str__(self) -> str:
        """Return what ``ckptool inspect`` prints; once it is closed, one line."""
        from ckptool import _report  # indirectly, because this package must not import ``inspecting``

        return str(_report(self)) if self._is_open else repr(self)

    def _repr_html_(self) -> str:
        from ckptool import _report

        found: str = _report(self)._repr_html_() if self._is_open else _html(repr(self), self.tensors)
        return found


def walk_of(checkpoint: Checkpoint, state_dict: StateDict) -> StateDictWalk | None:
    """Return the walk through a whole model; None for other state dicts."""
    of_model = state_dict.class_name is not None
    return next((walk for path, walk in checkpoint.walks if of_model and path == state_dict.key), None)


def _attributes_or_node(node: Inert, value: Callable[[Inert], Any]) -> Any:
    """Return the attributes of a namespace as a dict; any other node unchanged."""
    if isinstance(node, nodes.Call) and nodes.class_name(node) in ("argparse.Namespace", "types.SimpleNamespace"):
        return {key: value(inner) for key, inner in nodes.attribute_pairs(node) if isinstance(key, str)}
    return node


def _most_likely(found: Sequence[StateDict]) -> StateDict | None:
    found = [one for one in found if one.role != "model" or not is_explained(one.key, list(one))] or found
    chosen = choose_weights([(one.key, one.role) for one in found])
    return None if chosen is None else found[chosen]


def paths_above(key: str) -> Iterator[str]:
    """Yield the parents of a dotted path, the root (an empty text) last."""
    while key:
        key = key.rpartition(".")[0]
        yield key


def _is_same(one: StateDict, other: StateDict) -> bool:
    """Return whether two state dicts have the same entries: the same tensors under the same names, in one order."""
    if one.own_keys is not None or other.own_keys is not None or list(one) != list(other):
        return False
    if one.node is not None and one.node is other.node:
        return True
    if one.class_name is not None:
        return False  # two models may differ in what is not in their state_dict()
    pairs = zip(one.values(), other.values(), strict=True)
    return _rest(one) == _rest(other) and all(identity(a.info) == identity(b.info) for a, b in pairs)


def _rest(state_dict: StateDict) -> list[object]:
    """Return the other entries, with containers by the ids of their nodes; and whether torch made the state dict."""
    node = state_dict.node
    pairs = [
        pair for pair in nodes.mapping_pairs(node) or () if not isinstance(pair[0], str) or pair[0] not in state_dict
    ]
    values = [(id(one) if nodes.is_container(one) else (type(one), one)) for pair in pairs for one in pair]
    return [*values, bool(nodes.lookup(nodes.attribute_pairs(node), "_metadata"))]


def _html(caption: str, tensors: Mapping[str, LazyTensor]) -> str:
    """Return a table of tensors for a notebook."""
    from ckptool.sections import Table, html_of

    headers = ("name", "shape", "dtype", "device", "elements", "size")
    rows = [
        (name, str(list(one.shape)), one.dtype, one.device, f"{one.info.numel:,}", show_nbytes(one.info.total_nbytes))
        for name, one in tensors.items()
    ]
    return html_of(caption, [Table(headers, rows, ())])
