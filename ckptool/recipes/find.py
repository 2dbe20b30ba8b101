"""
Finds a recipe by name or path, and its numbers beside a checkpoint.

A name may also be that of a model type of transformers, whose own table says how a checkpoint becomes the weights of
its class: renames by regular expressions, one after another, and operations on tensors, some of them below one module
only. So the class is built without memory (on the device ``meta``); transformers itself renames each name, and runs its
operations on tensors without memory, which are traced. No tensor is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.checkpoints.weights import Weights
from ckptool.errors import MalformedFile, MigrationRefused, UnsupportedFeature
from ckptool.formats.json_beside import object_beside, quantization_of
from ckptool.messages import some
from ckptool.names.renaming import by_likeness
from ckptool.recipes.apply import Applied, Made, Move, apply_recipe, put_together
from ckptool.recipes.moves import concatenated, plain, settled, stacked
from ckptool.recipes.recipe import HINT, Recipe, recipe_of
from ckptool.sources.files import read_toml
from ckptool.tensors.reading import LazyTensor
from ckptool.tensors.tensor import row_major
from ckptool.torch_ops import needed

if TYPE_CHECKING:
    from ckptool.torch_ops.tracing import View

_NAMED: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "named")
_SUFFIX: Final = ".toml"
_TRANSFORMERS: Final = "transformers:"
_SETTINGS: Final = ("config.json", "params.json")
_INSIDE: Final = ("text_config", "llm_config")
"""Keys under which settings of models for pictures and text have those of the language model."""


Layout: TypeAlias = Callable[[Checkpoint, Weights], Applied]
"""Returns weights of a checkpoint in another layout."""


def applied(recipe: Recipe, numbers: Mapping[str, int], checkpoint: Checkpoint, weights: Weights) -> Applied:
    """
    Return weights of a checkpoint in the layout of a recipe; ``numbers`` are those that the caller gave.

    Raises:
        MigrationRefused: What ``apply_recipe`` refuses; or a quantised weight would be more than renamed.
    """
    given = {**settings_of(checkpoint), **numbers}
    return _whole(checkpoint, weights, apply_recipe(recipe, weights, given, checkpoint.source.cancellation))


def _whole(checkpoint: Checkpoint, weights: Weights, found: Applied) -> Applied:
    """Return what was made of weights; refuse it if a quantised one is more than renamed."""
    moved = {one for parts in found.weights.made_of.values() for one in parts}
    quantised = quantization_of(checkpoint) if moved else None
    head = weights.state_dict.head
    bound = {part for one, parts in quantised.bound for part in (one.name, *parts)} if quantised is not None else set()
    if broken := [name for name in moved if head + name in bound]:
        fact = f"{broken[0]!r} is quantised, or is a scale: it can only be renamed"
        hint = "Write it with `dequantize=True` first, and give what comes out to the recipe."
        raise MigrationRefused(fact, kind="recipe-not-plain", hint=hint)
    return found


def named_recipes() -> list[str]:
    """Return the names of the recipes that come with ckptool."""
    return sorted(name[: -len(_SUFFIX)] for name in os.listdir(_NAMED) if name.endswith(_SUFFIX))


def read_recipe(given: str | os.PathLike[str]) -> Recipe:
    """
    Return the recipe with a name, or in a file of TOML.

    Raises:
        MigrationRefused: No recipe has the name.
        MalformedFile: The file is not a recipe.
        FileUnavailable: It cannot be read.
    """
    text = os.fspath(given)
    is_path = text.endswith(_SUFFIX) or os.path.basename(text) != text or not isinstance(given, str)
    if is_path:
        return _from_file(os.path.splitext(os.path.basename(text))[0], text)
    names = named_recipes()
    if text.startswith(_TRANSFORMERS):
        hint = "What it does is in the report of a migration with it, also of one that is only planned."
        raise MigrationRefused(f"{text!r} is made for each checkpoint", kind="no-such-recipe", hint=hint)
    if text not in names:
        near = f"The nearest are {some(by_likeness(text, names))}. " if names else ""
        hint = f"{near}A recipe of your own is a path that ends in '.toml'."
        raise MigrationRefused(f"there is no recipe {text!r}", kind="no-such-recipe", hint=hint)
    return _of_ours(text)


@cache  # many files may be compared with the results of all recipes
def _of_ours(name: str) -> Recipe:
    return _from_file(name, os.path.join(_NAMED, name + _SUFFIX))


def _from_file(name: str, path: str) -> Recipe:
    def part(other: str) -> Recipe:
        if other not in named_recipes() or other == name:
            raise ValueError(f"a part is not a recipe that comes with ckptool: {other!r}")
        return _of_ours(other)

    table = read_toml(path, "bad-recipe", HINT)
    try:
        return recipe_of(name, table, part)
    except ValueError as error:
        raise MalformedFile(str(error), kind="bad-recipe", path=path, hint=HINT) from error


def requested(given: str | os.PathLike[str], numbers: Mapping[str, int], *, reverse: bool) -> Layout:
    """
    Return the requested recipe.

    Raises:
        ValueError: The numbers are not integers.
        MigrationRefused: There is no such recipe, or it cannot be reversed.
    """
    if wrong := next((name for name, value in numbers.items() if type(value) is not int), None):
        raise ValueError(f"recipe_arguments are integers: {wrong}={numbers[wrong]!r}")
    is_made = isinstance(given, str) and given.startswith(_TRANSFORMERS)
    recipe = Recipe(os.fspath(given), ()) if is_made else read_recipe(given)
    if unknown := [name for name in numbers if name not in {*recipe.numbers, *recipe.lets}]:
        fact = f"recipe {recipe.name!r} has no number {unknown[0]!r}"
        raise MigrationRefused(fact, kind="recipe-number", hint=f"Its numbers are {some(recipe.numbers or ['none'])}.")
    if is_made:
        return partial(_of_transformers, recipe.name, reverse)
    return partial(applied, recipe.reversed if reverse else recipe, dict(numbers))


def settings_of(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the integers in config.json, or params.json, beside a checkpoint, by name."""
    found: dict[str, int] = {}
    for name in _SETTINGS:
        settings = object_beside(checkpoint.path, checkpoint.source, name)
        inside = [settings.get(key) for key in _INSIDE]
        for one in (settings, *inside):
            if isinstance(one, Mapping):
                found |= {key: value for key, value in one.items() if type(value) is int and key not in found}
    return found


_FIRST: Final = (
    *("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
    *("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "PRETRAINING"),
)
"""Tasks whose classes have all heads."""
_DEQUANTIZES: Final = "Inkling2LoopDequantizeExperts"
"""An operation that makes quantised weights plain, and leaves alone others, which have no scales."""


def _of_transformers(name: str, reverse: bool, checkpoint: Checkpoint, weights: Weights) -> Applied:
    """
    Return what transformers makes of weights of the model type in a recipe's name when it loads them; with ``reverse``,
    when it saves them. Tensors that the class lacks stay as they are.

    Raises:
        MigrationRefused: transformers has no such model type, or cannot build its class from this config, or changes
            nothing, or a part of a tensor is missing.
        UnsupportedFeature: It does something to a tensor that is not a move of bytes.
        MissingPackage: transformers is not installed, or is older than 5.
    """
    model_type, config = (
        name.removeprefix(_TRANSFORMERS),
        object_beside(checkpoint.path, checkpoint.source, _SETTINGS[0]),
    )
    if not config:
        fact = f"{name!r} needs config.json beside the file, and there is none"
        raise MigrationRefused(fact, kind="recipe-number", hint="Put the config.json of the model beside the file.")
    said = config.get("model_type", model_type)
    if said != model_type:
        raise MigrationRefused(f"config.json says model type {said!r}, not {model_type!r}", kind="no-such-recipe")
    model = _model(model_type, config)
    changes = _part("conversion_mapping").get_model_conversion_mapping(model, add_legacy=not reverse)
    if reverse:  # a prefix that was removed, or was never there, is not known any more
        changes = [one for one in changes if not isinstance(one, _part("core_model_loading").PrefixChange)]
        changes = [change.reverse_transform() for change in changes[::-1]]
    made, moves = list[Made](), list[Move]()
    for group in _groups(list(weights.tensors), changes, model, reverse):
        names, tensors = group.names, _made(group, weights, model)
        single = weights.tensors[names[0]].info if len(names) == 1 and len(tensors) == 1 else None
        kept = [new for new, one in tensors.items() if one.info is single]
        made += [Made(names[0], new, tuple(names), None if new in kept else one) for new, one in tensors.items()]
        if not kept:
            before = tuple((one, weights.tensors[one].shape) for one in names)
            does = ", ".join(type(one).__name__ for one in group.converter.operations)
            moves.append(Move(does, before, tuple((new, one.shape) for new, one in tensors.items())))
    taken = {source for one in made for source in one.sources}
    if not moves and all(one.at == one.name for one in made):
        raise MigrationRefused(f"{name!r} leaves all names and tensors as they are", kind="recipe-unmatched")
    rest = [one for one in weights.names if one not in taken]
    return _whole(checkpoint, weights, put_together(name, weights, made, moves, rest))


def _part(name: str) -> Any:
    return needed(f"transformers.{name}".rstrip("."), "transformers", '"ckptool[transformers]"')


def _model(model_type: str, config: Mapping[str, Any]) -> Any:
    """Return a model on ``meta``: of the class that the config names, else of the first class of the model type."""
    transformers = _part("")
    if model_type not in transformers.CONFIG_MAPPING:
        fact = f"transformers {transformers.__version__} has no model type {model_type!r}"
        raise MigrationRefused(fact, kind="no-such-recipe")
    try:
        settings = transformers.CONFIG_MAPPING[model_type].from_dict(_without_code(config))
        found = list(_classes(type(settings)))
        asked = config.get("architectures") or ()
        with needed().device("meta"):
            return next((one for one in found if one.__name__ in asked), found[0])(settings)
    except Exception as error:  # a class may raise anything about a config
        reason = " ".join(str(error).split())[:200]
        raise MigrationRefused(
            f"transformers cannot build {model_type!r} from config.json: {type(error).__name__}: {reason}",
            hint="Put the config.json of the model beside the file.",
        ) from error


def _classes(settings: type) -> Iterator[Any]:
    """Yield the classes of transformers for a kind of config, those with all heads first."""
    auto = _part("models.auto.modeling_auto")
    tables = {name: one for name, one in sorted(auto.__dict__.items()) if re.fullmatch("MODEL_(FOR_.*_)?MAPPING", name)}
    for name in (*(f"MODEL_FOR_{kind}_MAPPING" for kind in _FIRST), "MODEL_MAPPING", *tables):
        classes = tables[name].get(settings, ())
        yield from classes if isinstance(classes, tuple) else (classes,)


def _without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without references to code, also in the configs in it."""
    settings = deepcopy(dict(config))
    left: list[dict[str, Any]] = [settings]
    while left:
        one = left.pop()
        one.pop("auto_map", None)
        left += [value for value in one.values() if isinstance(value, dict)]
    return settings


class _Group:
    """Tensors that are converted together: by the pattern that matched them, in the order of their numbers."""

    def __init__(self, target: str, converter: Any, renamed: Callable[[str], str]) -> None:
        self.target, self.converter = target, converter
        self.renamed = renamed  # how the results are renamed in the end
        self.parts: dict[str | None, list[str]] = {}

    @property
    def names(self) -> list[str]:
        return [name for part in self.parts.values() for name in part]


def _groups(names: Sequence[str], changes: list[Any], model: Any, reverse: bool) -> list[_Group]:
    """Return which tensors are converted together, as transformers does it."""
    loading = _part("core_model_loading")
    renamings = [change for change in changes if isinstance(change, loading.WeightRenaming)]
    converters = [change for change in changes if isinstance(change, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    there, prefix = model.state_dict(), model.base_model_prefix

    def renamed(name: str) -> str:
        return str(loading.apply_renamings(name, renamings))

    groups: dict[str, _Group] = {}
    for name in sorted(names, key=loading.dot_natural_key):
        if reverse:
            target, pattern = loading.apply_converters(name, converters)
            target = target if pattern else renamed(name)
        else:
            target, pattern = loading.rename_source_key(name, renamings, converters, prefix, there)
            if target not in there and name in there:
                target, pattern = loading.rename_source_key(name, [], [], prefix, there)
            if target not in there:
                continue
        group = groups.setdefault(target, _Group(target, by_pattern.get(pattern), renamed if reverse else str))
        group.parts.setdefault(pattern, []).append(name)
    return list(groups.values())


def _made(group: _Group, weights: Weights, model: Any) -> dict[str, LazyTensor]:
    """Return the tensors that a group becomes, by name; transformers' own operations on them are traced."""
    names, target = group.names, group.target
    if group.converter is None:
        if len(names) > 1:
            raise MigrationRefused(f"{len(names)} tensors would become {target!r}: {', '.join(names)}")
        return {target: weights.tensors[names[0]]}
    converter = deepcopy(group.converter)
    missing = [pattern for pattern in converter.source_patterns if pattern not in group.parts]
    if missing and type(converter.operations[0]).__name__ != _DEQUANTIZES:
        raise MigrationRefused(f"{target!r} needs {missing[0]!r}, which is missing")
    tracing = needed("ckptool.torch_ops.tracing").Tracing(_copied)
    for pattern in filter(group.parts.__contains__, converter.source_patterns):
        for name in group.parts[pattern]:
            tensor = plain(LazyTensor(name, weights.tensors[name].info))
            converter.add_tensor(target, name, pattern, tracing.tensor(tensor, tensor.shape))
    made = tracing.run(lambda: converter.convert(target, model=model, config=model.config))
    found = {}
    for name, one in made.items():
        view = tracing.view(one[0] if isinstance(one, list) else one)
        if view is None:
            operations = ", ".join(type(operation).__name__ for operation in converter.operations)
            fact = f"{target!r}: transformers does {operations} to it, which is not a move of bytes"
            raise UnsupportedFeature(fact)
        seen = _seen(view)
        is_kept = any(seen.info is weights.tensors[one].info for one in names)
        found[group.renamed(name)] = seen if is_kept else settled(seen)
    return found


def _copied(name: str, views: Sequence[View[LazyTensor]], dim: int) -> LazyTensor:
    """Return what torch makes of views: a copy, or several joined."""
    parts = [_seen(one) for one in views]
    if name == "stack":
        return stacked(parts, dim)
    return concatenated(parts, dim, None) if name == "cat" else settled(parts[0])


def _seen(view: View[LazyTensor]) -> LazyTensor:
    whole, shape, stride, begin = view
    if (shape, stride, begin) == (whole.shape, row_major(whole.shape), 0):
        return whole
    info = settled(whole).info
    return LazyTensor(
        whole.name, info._replace(shape=shape, stride=stride, storage_offset=info.storage_offset + begin, parts=())
    )
