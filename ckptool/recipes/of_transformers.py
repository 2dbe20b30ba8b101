"""
Recipes from transformers' own table of conversions: what makes a checkpoint of a model type the weights of its class.

The table is a list of changes of names by regular expressions, one after the other, and of operations on tensors, some
of them below one module only. So the class is built without memory (on the device ``meta``), transformers itself says
what becomes of each name, and `transformers_steps` says its operations as steps of a recipe. No tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from typing import Any

from ckptool.errors import MigrationRefused
from ckptool.recipes.transformers_steps import Rule, Shape, for_all_layers, is_for_scales, rules_of
from ckptool.torch_ops.packages import needed


def rules_of_transformers(
    model_type: str, shapes: Mapping[str, Shape], config: Mapping[str, Any], *, reverse: bool = False
) -> list[Rule]:
    """
    Return the rules that make of tensors what transformers' loading makes; with ``reverse``, what its saving makes.

    ``shapes`` are those of the tensors at hand, by their names: the rules are for these. Tensors that keep their names,
    or that the class has not, are in no rule.

    Raises:
        MigrationRefused: transformers has no such model type, or cannot build its class from this config, or a part of
            a tensor is missing.
        UnsupportedFeature: It does something to a tensor that is no move of bytes.
        MissingPackage: transformers is not installed, or is older than 5.
    """
    said = config.get("model_type", model_type)
    if said != model_type:
        raise MigrationRefused(f"config.json says model type {said!r}, not {model_type!r}", kind="no-such-recipe")
    model = _model(model_type, config)
    changes = _part("conversion_mapping").get_model_conversion_mapping(model, add_legacy=not reverse)
    if reverse:  # a prefix that was taken away, or was not there, is not known any more
        changes = [one for one in changes if not isinstance(one, _part("core_model_loading").PrefixChange)]
        changes = [change.reverse_transform() for change in changes[::-1]]
    rules = [rule for group in _groups(shapes, changes, model, reverse) for rule in _rules(group, model)]
    return for_all_layers([rule for rule in rules if rule["from"] != rule["to"] or "steps" in rule], shapes)


def _part(name: str) -> Any:
    return needed(f"transformers.{name}".rstrip("."), "transformers", '"ckptool[transformers]"')


def _model(model_type: str, config: Mapping[str, Any]) -> Any:
    """Return the class that the config names, if it is one of this model type, or the first of those; on ``meta``."""
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
    """Yield the classes that transformers has for a kind of config, those with all heads first."""
    auto = _part("models.auto.modeling_auto")
    tables = [
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
        auto.MODEL_FOR_PRETRAINING_MAPPING,
        auto.MODEL_MAPPING,
        *(
            one
            for name, one in sorted(auto.__dict__.items())
            if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING")
        ),
    ]
    for table in tables:
        classes = table.get(settings, ())
        yield from classes if isinstance(classes, tuple) else (classes,)


def _without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config that names no code to fetch, also in the configs in it."""
    settings = deepcopy(dict(config))
    left: list[dict[str, Any]] = [settings]
    while left:
        one = left.pop()
        one.pop("auto_map", None)
        left += [value for value in one.values() if isinstance(value, dict)]
    return settings


class _Group:
    """Tensors that become one, or several together: by the pattern that took them, in the order of their numbers."""

    def __init__(self, target: str, converter: Any, renamed: Callable[[str], str]) -> None:
        self.target, self.converter = target, converter
        self.renamed = renamed  # what is still done to the names of the results
        self.parts: dict[str | None, dict[str, Shape]] = {}


def _groups(shapes: Mapping[str, Shape], changes: list[Any], model: Any, reverse: bool) -> list[_Group]:
    """Return which tensors become which, as transformers says it."""
    loading = _part("core_model_loading")
    renamings = [change for change in changes if isinstance(change, loading.WeightRenaming)]
    converters = [change for change in changes if isinstance(change, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    there, prefix = model.state_dict(), model.base_model_prefix

    def renamed(name: str) -> str:
        return str(loading.apply_renamings(name, renamings))

    groups: dict[str, _Group] = {}
    for name in sorted(shapes, key=loading.dot_natural_key):
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
        group.parts.setdefault(pattern, {})[name] = tuple(shapes[name])
    return list(groups.values())


def _rules(group: _Group, model: Any) -> list[Rule]:
    """Return the rule for one group, or several where parts of some tensors become parts of others."""
    if group.converter is None:
        names = [name for part in group.parts.values() for name in part]
        if len(names) > 1:
            raise MigrationRefused(f"{len(names)} tensors would become {group.target!r}: {', '.join(names)}")
        return [{"from": names[0], "to": group.target}]
    patterns = group.converter.source_patterns
    missing = [pattern for pattern in patterns if pattern not in group.parts]
    if missing and not is_for_scales(group.converter):
        raise MigrationRefused(f"{group.target!r} needs {missing[0]!r}, which is missing")
    parts = [group.parts[pattern] for pattern in patterns if pattern in group.parts]
    return rules_of(group.converter, parts, _made(group, model), model, group.target)


def _made(group: _Group, model: Any) -> dict[str, Shape]:
    """Return the names and shapes of the results: transformers' own operations, on tensors without memory."""
    converter = deepcopy(group.converter)
    for pattern, part in group.parts.items():
        for name, shape in part.items():
            converter.add_tensor(group.target, name, pattern, needed().empty(shape, device="meta"))
    made = converter.convert(group.target, model=model, config=model.config)
    tensors = {name: one[0] if isinstance(one, list) else one for name, one in made.items()}
    return {group.renamed(name): tuple(tensor.shape) for name, tensor in tensors.items()}
