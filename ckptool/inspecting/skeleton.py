"""
Python code of a pickled model's classes (its skeleton): names, shapes and layers, without forward().

A module of torch.nn becomes a call, if its attributes imply exactly the entries in the file. Any other gets a class.
Modules of one class whose lines differ only in values share it: these values are arguments.

Only this of a file becomes code: names that are identifiers, numbers, and texts as literals of ASCII. All else is in
comments of one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, groupby
from keyword import iskeyword
from typing import Any, Final, NamedTuple, TypeAlias

from ckptool.checkpoints.checkpoint import Checkpoint, StateDict, walk_of
from ckptool.checkpoints.modules import Body, attributes_of, body_of, unbound, unwrapped
from ckptool.errors import LimitExceeded, UnsupportedFeature
from ckptool.messages import cut, show, some
from ckptool.names.wrappers import COMPONENTS
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Global, Inert
from ckptool.pickles.values import describe, scalar_of
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import identity

_DEEPEST: Final = 40
_MOST_CLASSES: Final = 1_000
_LONGEST: Final = 100
_WIDTH: Final = 110
_MOST_BELOW: Final = 16
"""Most modules in a layer of torch.nn."""
_FEW: Final = 2
"""Most equal items of a list that are written one by one."""
_OF_MODULES: Final = re.compile(r"training|_(backend|version|parameters|\w*buffers\w*|modules|\w*_hooks?(_\w+)?)")
"""Attributes that torch gives every module."""
_METHODS: Final = frozenset(
    (
        *("add_module", "apply", "bfloat16", "buffers", "call_super_init", "children", "compile", "cpu", "cuda"),
        *("double", "dump_patches", "eval", "extra_repr", "float", "forward", "get_buffer", "get_extra_state"),
        *("get_parameter", "get_submodule", "half", "ipu", "load_state_dict", "modules", "mtia", "named_buffers"),
        *("named_children", "named_modules", "named_parameters", "parameters", "requires_grad_", "set_extra_state"),
        *("set_submodule", "share_memory", "state_dict", "to", "to_empty", "train", "type", "xpu", "zero_grad"),
        "T_destination",
    )
)
"""Names of a module's own methods: torch refuses parameters and buffers with them."""
_TAKEN: Final = frozenset(("OrderedDict", "dict", "float", "model", "nn", "range", "self", "setattr", "super", "torch"))
"""Names that the code uses itself."""
_CLOSING: Final = {"(": ")", "[": "]"}


class _Value(NamedTuple):
    """A literal as code, and the default that is not written; with a default, the argument is written by its name."""

    text: str
    default: str | None = None


class _Made(NamedTuple):
    """What a call makes: the code before its arguments, and these, by name."""

    callee: str
    arguments: Sequence[tuple[str, _Part]] = ()
    """Of a class that is written here, they are known when all its modules are."""


_Part: TypeAlias = "_Value | _Made"
_Line: TypeAlias = "tuple[str, str, _Part | None]"
"""The code before a part, the name that it is about, and the part; for a comment, the text, the name, and None."""


class _Class:
    """A class to be written: for each module of it, the lines that make it, and the arguments of the class."""

    def __init__(self, name: str, full_name: str) -> None:
        self.name, self.full_name = name, full_name
        self.modules: list[tuple[list[_Line], list[tuple[str, _Part]]]] = []
        self.texts: list[str] = []
        """The values in its lines; some are names of arguments."""


def skeleton(checkpoint: Checkpoint) -> Iterator[str]:
    """
    Yield the lines of a program that makes models with the names, shapes and layers of those in a checkpoint.

    Raises:
        UnsupportedFeature: There is no whole model.
        LimitExceeded: Modules are nested too deep, or of too many kinds.
    """
    whole = [(one, walk) for one in checkpoint.state_dicts if (walk := walk_of(checkpoint, one)) is not None]
    if not whole or checkpoint.traits.program is not None:
        fact = "a program has its own code" if whole else "it holds no whole model, and names and shapes tell no class"
        raise UnsupportedFeature(f"no skeleton: {fact}", kind="no-skeleton")
    writer = _Writer(checkpoint)
    models = [(found, walk, *writer.model(found)) for found, walk in whole]
    for cls in writer.classes:
        _share(cls, set(writer.names))
    yield from ("from collections import OrderedDict", "", "import torch", "from torch import nn")
    for cls in writer.classes:
        yield from _text_of(cls)
    for number, (found, walk, part, ties) in enumerate(models, 1):
        name = "model" if number == 1 else f"model{number}"
        yield from ("", "", *f"{name} = {_text(part, iter([one.text for _, one in _leaves(part, '')]))}".split("\n"))
        for module, own, other in ties:
            yield f"setattr({name}.get_submodule({module}), {own}, {name}.get_parameter({other}))"
        if added := [one.name for one in walk.entries if one.kind is None] + [path for path, _ in walk.unlisted]:
            yield _comment(f"Code of its classes adds to its state_dict() what is not here: {some(added)}")
        given = f", key={found.key!a}" if found.key else ""
        yield f"# Its weights: ckptool.load_into({name}, {checkpoint.path!a}{given})"


class _Writer:
    """Collects the classes that modules need; those of inner modules come first."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.classes: list[_Class] = []
        self._checkpoint = checkpoint
        self._tensors: dict[str, LazyTensor] = {}
        self._known: dict[int, _Part | None] = {}
        self._alike: dict[object, _Class] = {}
        self.names = set(_TAKEN)

    def model(self, found: StateDict) -> tuple[_Part, list[tuple[str, str, str]]]:
        """Return the part that makes a model, and its ties as literals: module, name, path of the other parameter."""
        node, head = unbound(found.node), found.head
        while (inside := unwrapped(node, frozenset(COMPONENTS))) is not None:
            head += f"{COMPONENTS[nodes.class_name(node)]}."
            node = unbound(inside)
        there = {**self._checkpoint.attributes, **{f"{found.head}{name}": one for name, one in found.items()}}
        self._tensors = {name[len(head) :]: one for name, one in there.items() if name.startswith(head)}
        part = self._part(node, "", 0) or _Made("nn.Module(")
        firsts: dict[object, str] = {}
        ties = []
        for name, one in self._tensors.items():
            if one.info.kind != "parameter" or not one.info.numel or not all(map(_is_usable, name.split("."))):
                continue
            if _is_torchs(name.rpartition(".")[2]) or any(map(_OF_MODULES.fullmatch, name.split("."))):
                continue
            first = firsts.setdefault(identity(one.info), name)
            if first != name and _shape(one) is not None:
                module, _, own = name.rpartition(".")
                ties.append((ascii(module), ascii(own), ascii(first)))
        return part, ties

    def _part(self, node: Inert, path: str, depth: int) -> _Part | None:
        """Return the part that makes a module; None if the node is not one. A node always gives the same part."""
        if depth > _DEEPEST:
            raise LimitExceeded(f"modules nested more than {_DEEPEST} deep", actual=_DEEPEST)
        if id(node) not in self._known:
            body = body_of(node)
            self._known[id(node)] = None if body is None else self._made(node, body, path, depth)
        return self._known[id(node)]

    def _made(self, node: Inert, body: Body, path: str, depth: int) -> _Part:
        full_name = nodes.class_name(node)
        name = full_name.removesuffix(" (defined in the file)").rpartition(".")[2]
        is_of_torch = full_name.startswith("torch.nn.")
        known = _arguments_of(name, node, self._shapes(body, path)) if is_of_torch else None
        if known is not None:
            return _Made(f"nn.{name}(", tuple((one, _Value(_literal(value), default)) for one, value, default in known))
        children = [(key, self._part(one, f"{path}{key}.", depth + 1)) for key, one in body.children]
        container = _container(name, children) if is_of_torch and not body.parameters and not body.buffers else None
        if container is not None:
            return container
        lines = list(self._lines(node, body, children, path))
        kind = (full_name, *((before if part else "#", about, _kind(part)) for before, about, part in lines))
        if kind not in self._alike:
            if len(self.classes) == _MOST_CLASSES:
                raise LimitExceeded(f"modules of more than {_MOST_CLASSES:,} kinds", actual=_MOST_CLASSES)
            self._alike[kind] = _Class(_free(name if _is_identifier(name) else "Model", self.names), full_name)
            self.classes.append(self._alike[kind])
        cls = self._alike[kind]
        cls.modules.append((lines, []))
        return _Made(f"{cls.name}(", cls.modules[-1][1])

    def _shapes(self, body: Body, path: str) -> _Shapes:
        """Return the shapes of the entries of a layer, and of the modules below it, which are few in all layers."""
        found: dict[str, tuple[int, ...] | None] = {}
        todo = [(body, "")]
        for one, head in todo:  # the list grows
            for name, value in _named((*one.parameters, *one.buffers)):
                if value is not None and name not in one.non_persistent:
                    found[f"{head}{name}"] = _shape(self._tensors.get(f"{path}{head}{name}"))
            below = [(inner, f"{head}{name}.") for name, child in one.children if (inner := body_of(child)) is not None]
            todo += below if len(todo) < _MOST_BELOW else ()
        return found

    def _lines(self, node: Inert, body: Body, children: list[tuple[Inert, _Part | None]], path: str) -> Iterator[_Line]:
        """Yield the lines of a constructor: plain values, parameters, buffers, modules; all else as comments."""
        registered = {
            key for pairs in (body.parameters, body.buffers, children) for key, _ in pairs if type(key) is str
        }
        seen: set[str] = set()
        for name, value in dict(_named(attributes_of(node) or ())).items():
            if name in registered or _OF_MODULES.fullmatch(name):
                continue
            known = _plain(value)
            made = (
                _tensor(self._tensors.get(f"{path}{name}"), "buffer") if known is _ABSENT else _Value(_literal(known))
            )
            is_code = made is not None and _is_identifier(name) and not _is_torchs(name)
            yield (f"self.{name} = ", name, made) if is_code else (f"self.{name} = {describe(value)}", name, None)
        for how, pairs in (("parameter", body.parameters), ("buffer", body.buffers), ("module", children)):
            for name, value in pairs:
                made = value if how == "module" or value is None else _tensor(self._tensors.get(f"{path}{name}"), how)
                is_torchs = isinstance(name, str) and (
                    _OF_MODULES.fullmatch(name) or (how != "module" and _is_torchs(name))
                )
                if is_torchs or not _is_usable(name) or name in seen or (value is not None and made is None):
                    yield f"A {how} that is not written here: {describe(name)}", "", None
                    continue
                seen.add(name)
                if _is_identifier(name) and how != "buffer" and (made is not None or how == "module"):
                    yield f"self.{name} = ", name, made or _Value("None")
                    continue
                stays = (("persistent", _Value("False", "True")),) if name in body.non_persistent else ()
                given = ("", _Value(ascii(name))), ("", made or _Value("None")), *stays
                yield "", name, _Made(f"self.register_{how}(", given)


def _named(pairs: nodes.Pairs) -> Iterator[tuple[str, Inert]]:
    return ((name, value) for name, value in pairs if isinstance(name, str))


def _shape(tensor: LazyTensor | None) -> tuple[int, ...] | None:
    """Return the shape of a tensor that torch.zeros() can make in no more memory than it has in the file; else None."""
    info = tensor.info if tensor is not None else None
    if info is None or info.layout != "strided" or info.storage is None or info.dtype.packed > 1:
        return None
    return info.shape if info.nbytes <= info.storage.nbytes else None


def _tensor(tensor: LazyTensor | None, how: str) -> _Part | None:
    """Return the part that makes a parameter or a buffer; None if no line can."""
    shape = _shape(tensor)
    if tensor is None or shape is None:
        return None
    dtype = _Value(f"torch.{tensor.dtype}", "torch.float32")
    values = _Made("torch.zeros(", (("", _Value(_literal(shape))), ("dtype", dtype)))
    is_trained = tensor.info.requires_grad is not False and tensor.dtype.startswith(("float", "bfloat", "complex"))
    trained = _Value(str(is_trained), "True")
    return values if how == "buffer" else _Made("nn.Parameter(", (("", values), ("requires_grad", trained)))


def _container(name: str, children: Sequence[tuple[Inert, _Part | None]]) -> _Part | None:
    """Return the call that makes a container of torch.nn without entries of its own; None for other modules."""
    items = tuple((key, part) for key, part in children if part is not None and isinstance(key, str))
    if len(items) < len(children):
        return None
    if name in ("TransformerEncoder", "TransformerDecoder"):
        inside = dict(items)
        layers, norm = inside.pop("layers", None), inside.pop("norm", _Value("None", "None"))
        same = [one for _, one in layers.arguments] if isinstance(layers, _Made) else []
        one = same[0] if same and not inside else None
        if not isinstance(one, _Made) or one.callee != f"nn.{name}Layer(" or any(other != one for other in same):
            return None
        return _Made(f"nn.{name}(", (("layer", one), ("layers", _Value(str(len(same)))), ("norm", norm)))
    if not items:
        return _Made(f"nn.{name}(") if name in ("Sequential", "ModuleList", "ModuleDict") else None
    if [key for key, _ in items] == [str(number) for number in range(len(items))]:
        callee = {"Sequential": "nn.Sequential(", "ModuleList": "nn.ModuleList(["}.get(name)
    else:
        are_keywords = all(
            _is_identifier(key) and not _is_torchs(key) and not _OF_MODULES.fullmatch(key) for key, _ in items
        )
        callees = {"Sequential": "nn.Sequential(OrderedDict(", "ModuleDict": "nn.ModuleDict(dict("}
        callee = callees.get(name) if are_keywords else None
    return None if callee is None else _Made(callee, items)


def _kind(part: _Part | None) -> object:
    """Return an object that is equal for parts that differ only in values."""
    if not isinstance(part, _Made):
        return part and part.default
    return part.callee, tuple((name, _kind(one)) for name, one in part.arguments)


def _leaves(part: _Part, about: str) -> Iterator[tuple[str, _Value]]:
    """Yield the values in a part, each with a name that it can have as an argument."""
    if isinstance(part, _Value):
        yield about, part
        return
    for name, one in part.arguments:
        yield from _leaves(one, f"{about}_{name}".strip("_"))


def _share(cls: _Class, taken: set[str]) -> None:
    """Make arguments of a class of the values that differ among its modules; values that are always equal share one."""
    rows = [[leaf for _, about, part in one if part for leaf in _leaves(part, about)] for one, _ in cls.modules]
    names: dict[tuple[str, ...], str] = {}
    for column in zip(*rows, strict=True):
        texts = tuple(value.text for _, value in column)
        if len(set(texts)) > 1 and texts not in names:
            base = re.sub(r"\W", "_", column[0][0], flags=re.ASCII)
            names[texts] = _free(base if _is_identifier(base) else "argument", taken)
        cls.texts.append(names.get(texts, texts[0]))
    for index, (_, arguments) in enumerate(cls.modules):
        arguments += [(name, _Value(texts[index], "")) for texts, name in names.items()]


def _text_of(cls: _Class) -> Iterator[str]:
    """Yield the lines of a class."""
    yield from ("", "", _comment(cls.full_name), f"class {cls.name}(nn.Module):")
    lines, arguments = cls.modules[0]
    yield from f"    {_call('def __init__(', ['self', *(name for name, _ in arguments)], 4)}:".split("\n")
    yield "        super().__init__()"
    texts = iter(cls.texts)
    for before, _, part in lines:
        text = _comment(before) if part is None else f"{before}{_text(part, texts, 8)}"
        yield from f"        {text}".split("\n")
    yield from ("", "    def forward(self, *inputs):", "        raise NotImplementedError")


def _text(part: _Part, texts: Iterator[str], indent: int = 0) -> str:
    """Return the code of a part; its values are taken from ``texts``."""
    if isinstance(part, _Value):
        return next(texts)
    callee, given = part.callee, []
    for name, one in part.arguments:
        text, default = _text(one, texts, indent + 4), one.default if isinstance(one, _Value) else None
        is_keyword = callee.endswith(("OrderedDict(", "dict(")) or default is not None
        if text != default:
            given.append(f"{name}={text}" if is_keyword else text)
    if callee in ("nn.Sequential(", "nn.ModuleList(["):
        runs = [(text, len(list(alike))) for text, alike in groupby(given)]
        is_one = len(runs) == 1 and callee.endswith("[")
        given = []
        for text, times in runs:
            many = f"{text} for _ in range({times})"
            given += [text] * times if times <= _FEW else [many if is_one else f"*[{many}]"]
    return _call(callee, given, indent)


def _call(callee: str, given: Sequence[str], indent: int) -> str:
    """Return a call, with a line for each argument if it would be long."""
    end = "".join(_CLOSING[one] for one in reversed(callee) if one in _CLOSING)
    line = f"{callee}{', '.join(given)}{end}"
    if "\n" not in line and indent + len(line) <= _WIDTH:
        return line
    edge = "\n" + " " * indent
    return f"{callee}{edge}    {f',{edge}    '.join(given)}{edge}{end}"


def _comment(text: str) -> str:
    return f"# {cut(show(text), 4 * _LONGEST)}".encode("ascii", "backslashreplace").decode()


def _free(name: str, taken: set[str]) -> str:
    """Return a name, with a number appended if it is taken, and take it."""
    free = next(one for number in count(1) if (one := name if number == 1 else f"{name}{number}") not in taken)
    taken.add(free)
    return free


def _is_identifier(name: object) -> bool:
    """Return whether a name can be an attribute in code; Python would rename those that begin with two underscores."""
    return _is_usable(name) and str(name).isascii() and str(name).isidentifier() and not iskeyword(str(name))


def _is_usable(name: object) -> bool:
    """Return whether a module can have an entry of a name."""
    return isinstance(name, str) and 0 < len(name) <= _LONGEST and "." not in name and not name.startswith("__")


def _is_torchs(name: str) -> bool:
    return name in _METHODS or name.startswith("register_")


# A line of the table is about the classes whose names match. ``name`` is a positional argument, ``name=default`` one
# with a default. After these, ``<path`` is the attribute of an inner module that has the value; with ``?entry``, the
# value is whether there is such an entry. Other attributes are not arguments, whoever has set them.
_TABLE: Final = r"""
Linear: in_features out_features bias=True?bias
Bilinear: in1_features in2_features out_features bias=True?bias
Conv(Transpose)?[123]d: in_channels out_channels kernel_size stride=1 padding=0 output_padding=0 dilation=1 groups=1
  bias=True?bias padding_mode='zeros'
(Sync)?BatchNorm([123]d)?: num_features eps=1e-05 momentum=0.1 affine=True?weight track_running_stats=True?running_mean
InstanceNorm[123]d: num_features eps=1e-05 momentum=0.1 affine=False?weight track_running_stats=False?running_mean
GroupNorm: num_groups num_channels eps=1e-05 affine=True?weight
LayerNorm: normalized_shape eps=1e-05 elementwise_affine=True?weight bias=True?bias
RMSNorm: normalized_shape eps=None elementwise_affine=True?weight
LocalResponseNorm: size alpha=0.0001 beta=0.75 k=1.0
Embedding(Bag)?: num_embeddings embedding_dim padding_idx=None max_norm=None norm_type=2.0 scale_grad_by_freq=False
  sparse=False mode='mean' include_last_offset=False
(RNN|LSTM|GRU)(Cell)?: input_size hidden_size num_layers=1 bias=True batch_first=False dropout=0.0 bidirectional=False
  proj_size=0 nonlinearity='tanh'
MultiheadAttention: embed_dim num_heads dropout=0.0 bias=True?in_proj_bias add_bias_kv=False?bias_k add_zero_attn=False
  batch_first=False
Transformer(En|De)coderLayer: d_model<self_attn.embed_dim nhead<self_attn.num_heads
  dim_feedforward=2048<linear1.out_features dropout=0.1<dropout.p activation='relu' layer_norm_eps=1e-05<norm1.eps
  batch_first=False<self_attn.batch_first norm_first=False bias=True?linear1.bias
PReLU: num_parameters=1
(ReLU6?|SiLU|SELU|Mish|Hardswish|Hardsigmoid): inplace=False
C?ELU: alpha=1.0 inplace=False
LeakyReLU: negative_slope=0.01 inplace=False
Hardtanh: min_val=-1.0 max_val=1.0 inplace=False
GELU: approximate='none'
(Sigmoid|Tanh|LogSigmoid|Softsign|Tanhshrink|Softmax2d|Identity):
((Log)?Softmax|Softmin|GLU): dim
(Feature)?(Alpha)?Dropout[123]?d?: p inplace=False
(Max|Avg)Pool[123]d: kernel_size stride=None padding=0 dilation=1 return_indices=False ceil_mode=False
  count_include_pad=True divisor_override=None
Adaptive(Max|Avg)Pool[123]d: output_size return_indices=False
(Zero|Reflection|Replication|Circular)Pad[123]d: padding
ConstantPad[123]d: padding value
Flatten: start_dim=1 end_dim=-1
Unflatten: dim unflattened_size
Upsample: size=None scale_factor=None mode='nearest' align_corners=None recompute_scale_factor=None
PixelShuffle: upscale_factor
(MSE|L1|BCE|BCEWithLogits)Loss: reduction='mean'
CrossEntropyLoss: ignore_index=-100 reduction='mean' label_smoothing=0.0
"""
_ROWS: Final = [
    (re.compile(kinds), row)
    for kinds, _, row in (line.partition(":") for line in _TABLE.replace("\n  ", " ").strip().split("\n"))
]
_ARGUMENT: Final = re.compile(r"(\w+)(?:=([^<?\s]+))?(?:<(\S+)|\?(\S+))?")
_SIZES: Final = ("kernel_size", "stride", "padding", "dilation", "output_padding")
"""Arguments for which one number stands for the same in all dimensions."""
_GATES: Final = {"RNN": 1, "GRU": 3, "LSTM": 4}
_LONGEST_VALUE: Final = 80
_MOST_ITEMS: Final = 16

_Shapes: TypeAlias = "Mapping[str, tuple[int, ...] | None]"
"""The shapes of entries; None for one that is not known."""
_Known: TypeAlias = "tuple[str, Any, str | None]"
"""An argument: its name, its value, and the default as code; None for positional ones."""


_ABSENT: Final = object()
"""Stands for a value that is not there, or that is not plain."""


def _arguments_of(name: str, module: Inert, shapes: _Shapes) -> list[_Known] | None:
    """
    Return the arguments with which a class of torch.nn makes a layer with these entries, positional ones first.

    Return None if the class is not known, a value is not plain, or the layer would have other entries.
    """
    row = next((row for kinds, row in _ROWS if kinds.fullmatch(name)), None)
    if row is None:
        return None
    modules = [key for key, _ in nodes.mapping_pairs(nodes.lookup(nodes.attribute_pairs(module), "_modules")) or ()]
    found: dict[str, _Known] = {}
    for argument, default, path, entry in _ARGUMENT.findall(row):
        value = (entry in shapes) if entry else _attribute(module, (path or argument).split("."))
        if value is not _ABSENT or not default or argument in modules:  # an older torch has fewer attributes
            found[argument] = argument, value, default or None
    values = {argument: value for argument, value, _ in found.values()}
    for argument in _SIZES:
        if isinstance(size := values.get(argument), tuple) and len(set(size)) == 1 and "output_size" not in values:
            found[argument] = argument, size[0], found[argument][2]
    return list(found.values()) if _ABSENT not in values.values() and _has_just(name, values, shapes) else None


def _attribute(module: Inert, path: list[str]) -> Any:
    for one in path[:-1]:
        below = nodes.mapping_pairs(nodes.lookup(nodes.attribute_pairs(module), "_modules"))
        module = nodes.lookup(below or (), one)
    found = [value for key, value in nodes.attribute_pairs(module) if isinstance(key, str) and key == path[-1]]
    if found and path == ["activation"] and isinstance(found[-1], Global):
        return found[-1].name if found[-1].name in ("relu", "gelu") else _ABSENT
    return _plain(found[-1]) if found else _ABSENT


def _plain(node: Inert, depth: int = 0) -> Any:
    """Return a number, a truth value, None, a short text, or a short tuple or list of such; else _ABSENT."""
    if isinstance(node, list | tuple):
        items = [_plain(one, depth + 1) for one in node] if depth < 2 and len(node) <= _MOST_ITEMS else [_ABSENT]
        return _ABSENT if _ABSENT in items else type(node)(items)
    if node is None or type(node) is float:
        return node
    value = scalar_of(node)
    return _ABSENT if value is None or (isinstance(value, str) and len(value) > _LONGEST_VALUE) else value


def _literal(value: Any) -> str:
    """Return a plain value as Python code, in ASCII."""
    if isinstance(value, float):
        return repr(value) if value - value == 0 else f"float('{value}')"
    if isinstance(value, list | tuple):
        items = ", ".join(map(_literal, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
    return ascii(value)


def _has_just(name: str, values: Mapping[str, Any], shapes: _Shapes) -> bool:
    """Return whether a layer with these arguments has exactly these parameters and persistent buffers."""
    left = dict(shapes)
    try:
        for key, *shape in _entries(name, values):
            if key not in left and key == "num_batches_tracked":  # torch has it since 0.4.1
                continue
            if left.pop(key, None) != tuple(shape):
                return False
    except (KeyError, TypeError, ValueError, ZeroDivisionError):  # the class does not take such arguments
        return False
    return not left


def _entries(name: str, values: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield the name and the sizes of each parameter and persistent buffer of a layer."""
    has_bias = bool(values.get("bias"))
    if name in ("Linear", "Bilinear"):
        inputs = [values[one] for one in ("in_features", "in1_features", "in2_features") if one in values]
        yield "weight", values["out_features"], *inputs
        yield from [("bias", values["out_features"])] * has_bias
    elif name.startswith("Conv"):
        size, into, out = values["kernel_size"], values["in_channels"], values["out_channels"]
        first, second = (into, out) if "Transpose" in name else (out, into)
        yield (
            "weight",
            first,
            second // values["groups"],
            *(size if isinstance(size, tuple) else [size] * int(name[-2])),
        )
        yield from [("bias", out)] * has_bias
    elif "Norm" in name and name != "LocalResponseNorm":
        size = values[next(one for one in ("num_features", "num_channels", "normalized_shape") if one in values)]
        sizes = size if isinstance(size, list | tuple) else [size]
        is_affine = values.get("affine", values.get("elementwise_affine"))
        yield from [("weight", *sizes)] * is_affine
        yield from [("bias", *sizes)] * (is_affine and values.get("bias", name != "RMSNorm"))
        if values.get("track_running_stats"):
            yield from (("running_mean", size), ("running_var", size), ("num_batches_tracked",))
    elif name.startswith("Embedding"):
        yield "weight", values["num_embeddings"], values["embedding_dim"]
    elif name == "PReLU":
        yield "weight", values["num_parameters"]
    elif "hidden_size" in values:
        yield from _of_rnn(name, values)
    elif name == "MultiheadAttention":
        yield from _of_attention(values)
    elif "nhead" in values:
        yield from _of_transformer(name, values)


def _of_rnn(name: str, values: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    hidden, gates = values["hidden_size"], _GATES[name.removesuffix("Cell")] * values["hidden_size"]
    out = values.get("proj_size") or hidden
    ways = ("", "_reverse") if values.get("bidirectional") else ("",)
    for layer in range(values.get("num_layers", 1)):  # the caller takes no more of them than there are
        for way in ways:
            end = "" if name.endswith("Cell") else f"_l{layer}{way}"
            yield f"weight_ih{end}", gates, len(ways) * out if layer else values["input_size"]
            yield f"weight_hh{end}", gates, out
            yield from ((f"{one}{end}", gates) for one in ("bias_ih", "bias_hh") if values["bias"])
            yield from [(f"weight_hr{end}", out, hidden)] * (out != hidden)


def _of_attention(values: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    width = values["embed_dim"]  # also of keys and values, else there are other entries
    yield from (("in_proj_weight", 3 * width, width), ("out_proj.weight", width, width))
    yield from [("in_proj_bias", 3 * width), ("out_proj.bias", width)] * bool(values["bias"])
    yield from [("bias_k", 1, 1, width), ("bias_v", 1, 1, width)] * bool(values.get("add_bias_kv"))


def _of_transformer(name: str, values: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    width, wide, bias = values["d_model"], values["dim_feedforward"], bool(values["bias"])
    two = name == "TransformerDecoderLayer"
    for one in ("self_attn", "multihead_attn")[: 1 + two]:
        yield from ((f"{one}.{key}", *shape) for key, *shape in _of_attention({"embed_dim": width, "bias": bias}))
    norms = [(f"norm{number}", width) for number in range(1, 3 + two)]
    for one, *shape in (("linear1", wide, width), ("linear2", width, wide), *norms):
        yield f"{one}.weight", *shape
        yield from [(f"{one}.bias", shape[0])] * bias
