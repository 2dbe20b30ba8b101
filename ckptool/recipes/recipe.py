"""
``Recipe``: its rules, read from TOML; each has an inverse, except ``drop``.

Everything that can be wrong with a recipe itself is checked here: names of variables, steps that do not fit each other,
numbers that depend on each other in a circle.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, product
from math import prod
from operator import add, floordiv, mul, sub
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from ckptool.errors import MigrationRefused
from ckptool.messages import some
from ckptool.names.patterns import Pattern, said_in

StepMode: TypeAlias = Literal["each", "lists", "rows", "to lists", "apart"]
"""What a step works on: each tensor; lists to join; rows to join, with one tensor of each name; or tensors to cut."""
Number: TypeAlias = int | str
"""An integer, or an expression of integers and names: ``num_attention_heads * head_dim``."""

_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "rename": (),
    "drop": (),
    "concat": ("dim", "sizes", "parts", "order"),
    "split": ("dim", "sizes", "order"),
    "chunk": ("dim", "parts", "order"),
    "stack": ("dim",),
    "unstack": ("dim",),
    "transpose": ("dims", "of"),
    "permute": ("dims", "of"),
    "reshape": ("shape", "was", "of"),
    "rope": ("heads", "of"),
    "unrope": ("heads", "of"),
}
"""The parameters of each operation."""
OPERATIONS: Final = tuple(_PARAMETERS)
_NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "split": ("sizes",),
    "permute": ("dims",),
    "reshape": ("shape", "was"),
    "rope": ("heads",),
    "unrope": ("heads",),
}
_KEYS: Final = ("about", "source", "from", "to", "rest", "let", "rule", "part")
_ABOUT_RULE: Final = ("from", "to", "each", "only")
_WAYS: Final = ("forward", "back")
_SIGNS: Final[Mapping[type[ast.operator], Any]] = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.FloorDiv: floordiv}
_ANY_PREFIX: Final = "{p}."
_LONGEST: Final = 200
"""Most characters of an expression."""
_MOST: Final = 1 << 62
_MOST_LETS: Final = 100
_MOST_RULES: Final = 20_000
_LONGEST_NAME: Final = 2_000
"""Most characters of a name, with all alternatives of its variables."""
HINT: Final = "docs/layouts.md says what a recipe may have."


class Step(NamedTuple):
    """One operation on the tensors of a rule."""

    op: str
    dim: int = 0
    sizes: tuple[Number, ...] = ()
    dims: tuple[int, ...] = ()
    shape: tuple[Number, ...] = ()
    was: tuple[Number, ...] = ()
    heads: Number = 1
    parts: Number | None = None
    order: tuple[int, ...] = ()
    """The part in each place, of those that are joined or cut; in their order by default."""
    of: tuple[int, ...] = ()
    """Numbers of the tensors that it changes; all by default."""

    @property
    def inverse(self) -> Step:
        """The step that undoes it."""
        if self.op == "concat":
            return self._replace(op="split" if self.sizes else "chunk")
        if self.op == "permute":
            return self._replace(dims=tuple(self.dims.index(dim) for dim in range(len(self.dims))))
        if self.op == "reshape":
            return self._replace(shape=self.was, was=self.shape)
        others = {"split": "concat", "chunk": "concat", "stack": "unstack", "rope": "unrope"}
        others |= {new: old for old, new in others.items() if new != "concat"}
        return self._replace(op=others.get(self.op, self.op))

    def __str__(self) -> str:
        given = self._asdict()
        shown = [given[name] for name in _PARAMETERS[self.op] if name != "was"]
        words = [f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value) for value in shown]
        return " ".join([self.op, *(word for word in words if word not in ("[]", "None"))])


class Rule(NamedTuple):
    """How tensors whose names match ``sources`` become others; ``targets`` is empty if they are dropped."""

    sources: tuple[Pattern, ...]
    targets: tuple[Pattern, ...]
    steps: tuple[Step, ...]
    only: str = ""
    """The only direction that it applies to: ``forward`` or ``back``; empty for both."""

    @property
    def is_rename(self) -> bool:
        """Whether tensors stay unchanged."""
        return all(step.op == "rename" for step in self.steps)

    @property
    def does(self) -> str:
        """Its operations, as text."""
        return ", ".join(map(str, self.steps)) or "rename"

    @property
    def reversed(self) -> Rule:
        only = _WAYS[1 - _WAYS.index(self.only)] if self.only else ""
        return Rule(self.targets, self.sources, tuple(step.inverse for step in reversed(self.steps)), only)

    def __str__(self) -> str:
        sources, targets = (" + ".join(map(str, side)) for side in (self.sources, self.targets))
        return f"{sources} -> {targets}" if targets else f"drop {sources}"


@dataclass(frozen=True)
class Recipe:
    """How one layout becomes another."""

    name: str
    rules: tuple[Rule, ...]
    about: str = ""
    source: str = ""
    """The code that the layout comes from."""
    sides: tuple[str, str] = ("", "")
    """The names of the two layouts."""
    keeps_rest: bool = False
    """Whether names that no rule takes stay as they are."""
    lets: Mapping[str, Number] = field(default_factory=dict)
    """Numbers to use if the settings of the checkpoint do not give them."""

    @property
    def reversed(self) -> Recipe:
        """
        The recipe in the other direction.

        Raises:
            MigrationRefused: It drops something, which no recipe can restore.
        """
        rules = [rule for rule in self.rules if rule.only != "forward"]
        dropped = next((rule for rule in rules if not rule.targets), None)
        if dropped is not None:
            fact = f"recipe {self.name!r} has no way back: it drops {str(dropped.sources[0])!r}"
            raise MigrationRefused(fact, kind="bad-recipe", hint="Write a recipe for the other way.")
        turned = tuple(rule.reversed for rule in rules)
        return replace(self, rules=turned, sides=(self.sides[1], self.sides[0]))

    @property
    def numbers(self) -> list[str]:
        """The names of the numbers that its rules and its own numbers need, without those that it defines."""
        steps = (step for rule in self.rules for step in rule.steps)
        own = [(*step.sizes, *step.shape, *step.was, step.heads, step.parts or 0) for step in steps]
        used = dict.fromkeys(name for one in chain(self.lets.values(), *own) for name in _names_in(one))
        return [name for name in used if name not in self.lets]


def value_of(recipe: Recipe, given: Mapping[str, int]) -> Callable[[Number], int]:
    """
    Return a function from the expressions in a recipe to their values: by the given numbers, then by its own.

    It raises MigrationRefused where one needs a name that nothing defines, divides by 0, or becomes too large.
    """
    known = dict(given)

    def value(number: Number) -> int:
        if isinstance(number, int):
            return number
        for name in _names_in(number):
            if name not in known and name not in recipe.lets:
                lacking = [repr(one) for one in recipe.numbers if one not in known] or [repr(name)]
                fact = f"recipe {recipe.name!r} needs {some(lacking, 8)}, and no config.json beside the file says it"
                hint = f"Put that of the model there, or say each with `recipe_arguments=`, as {name}=32."
                raise MigrationRefused(fact, kind="recipe-number", hint=hint)
            known[name] = known[name] if name in known else value(recipe.lets[name])  # few, and not in a circle
        try:
            found = _evaluate(_parsed(number), known)
        except ZeroDivisionError as error:
            raise MigrationRefused(f"{number!r} divides by 0", kind="recipe-number") from error
        if abs(found) > _MOST:
            raise MigrationRefused(f"{number!r} is not a size of a tensor: {found:,}", kind="recipe-number")
        return found

    return value


@lru_cache
def _parsed(text: str) -> ast.expr:
    """Return an expression of integers and names; raise ValueError if it is something else."""
    refused = f"{text[:_LONGEST]!r} is no number, and nothing but numbers, names, + - * // and parentheses"
    if len(text) > _LONGEST:
        raise ValueError(refused)
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(refused) from error
    for node in ast.walk(body):  # a list of what may be there, so that nothing in a recipe could be run
        is_number = isinstance(node, ast.Constant) and type(node.value) is int
        if not (is_number or isinstance(node, ast.Name | ast.BinOp | ast.Load) or type(node) in _SIGNS):
            raise ValueError(refused)
    return body


def _names_in(number: Number) -> list[str]:
    nodes = () if isinstance(number, int) else ast.walk(_parsed(number))
    return list(dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name)))


def _evaluate(node: ast.expr, known: Mapping[str, int]) -> int:
    """Return the value of an expression of at most 200 characters, which bounds its depth."""
    if isinstance(node, ast.Constant):
        return int(str(node.value))
    if isinstance(node, ast.Name):
        return known[node.id]
    assert isinstance(node, ast.BinOp)  # _parsed let nothing else pass
    found: int = _SIGNS[type(node.op)](_evaluate(node.left, known), _evaluate(node.right, known))
    return found


def recipe_of(name: str, table: Mapping[str, Any], named: Callable[[str], Recipe]) -> Recipe:
    """
    Return the recipe in a table of TOML; ``named`` returns those that are parts of it.

    Raises:
        ValueError: A key, a pattern or a step has no meaning, or steps do not fit what they get.
    """
    _refuse_unknown(table, _KEYS, "")
    rest = table.get("rest", "refuse")
    if rest not in ("refuse", "keep"):
        raise ValueError(f'rest is "refuse" or "keep", not {rest!r}')
    texts = {key: table.get(key, "") for key in ("about", "source", "from", "to")}
    if wrong := next((key for key, text in texts.items() if not isinstance(text, str)), None):
        raise ValueError(f"{wrong} is not text")
    given = table.get("let", {})
    if not isinstance(given, dict) or len(given) > _MOST_LETS:
        raise ValueError(f"let is not a table of at most {_MOST_LETS} numbers")
    lets = {key: _number(value, f"let.{key}") for key, value in given.items()}
    _refuse_circles(lets)
    tables, parts = (table.get(key, []) for key in ("rule", "part"))
    if not (tables or parts) or not all(isinstance(one, list) for one in (tables, parts)):
        raise ValueError("it has no rules: write [[rule]]")
    if not all(isinstance(one, dict) for one in (*tables, *parts)):
        raise ValueError("a rule, or a part, is not a table")
    rules: list[Rule] = []
    for one in parts:
        _refuse_unknown(one, ("recipe", "from", "to"), "part ")
        other = named(str(one.get("recipe")))
        rules += [_of_part(rule, str(one.get("from", "")), str(one.get("to", ""))) for rule in other.rules]
        lets = {**other.lets, **lets}
    for number, one in enumerate(tables, 1):
        try:
            rules += _rules(one)
        except ValueError as error:
            raise ValueError(f"rule {number}: {error}") from error
        if len(rules) > _MOST_RULES:
            raise ValueError(f"more than {_MOST_RULES:,} rules")
    return Recipe(
        name, tuple(rules), texts["about"], texts["source"], (texts["from"], texts["to"]), rest == "keep", lets
    )


def _refuse_unknown(table: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    if unknown := [key for key in table if key not in known]:
        raise ValueError(f"unknown {what}key {unknown[0]!r}: there are {some(list(known), 12)}")


def _refuse_circles(lets: Mapping[str, Number]) -> None:
    """Raise ValueError if numbers depend on each other, or on themselves, in a circle."""
    left = {name: [one for one in _names_in(number) if one in lets] for name, number in lets.items()}
    while ready := [name for name, inside in left.items() if not any(one in left for one in inside)]:
        for name in ready:
            del left[name]
    if left:
        raise ValueError(f"numbers are made of each other in a circle: {some(sorted(left))}")


def _number(value: object, what: str) -> Number:
    if isinstance(value, str):
        _parsed(value)
        return value
    if type(value) is not int or abs(value) > _MOST:
        raise ValueError(f"{what} is no integer, and no expression: {value!r}")
    return value


def _rules(table: Mapping[str, Any]) -> Iterator[Rule]:
    """Yield the rule of a table, or one for each entry of ``each``, whose texts are put into the names."""
    steps = tuple(_steps(table))
    sources, targets = (_texts(table.get(key, []), key) for key in ("from", "to"))
    only = table.get("only", "")
    if only not in ("", *_WAYS):
        raise ValueError(f"only is 'forward' or 'back', not {only!r}")
    for entry in _entries(table.get("each", [{}])):
        sides = []
        for side in (sources, targets):
            texts = list(side)
            for key, text in entry.items():
                if any(len(one) + one.count(f"<{key}>") * len(str(text)) > _LONGEST_NAME for one in texts):
                    raise ValueError(f"each makes a name of more than {_LONGEST_NAME:,} characters")
                texts = [one.replace(f"<{key}>", str(text)) for one in texts]
            sides.append(texts)
        rule = _rule(sides[0], sides[1], steps, only)
        _check(rule)
        if targets:
            _check(rule.reversed)
        yield rule


def _rule(sources: Sequence[str], targets: Sequence[str], steps: tuple[Step, ...], only: str) -> Rule:
    known = said_in([*sources, *targets])
    sides = [tuple(Pattern(text, known) for text in side) for side in (sources, targets)]
    return Rule(sides[0], sides[1], steps, only)


def _of_part(rule: Rule, before: str, after: str) -> Rule:
    """Return a rule of another recipe for names with these prefixes, in place of any prefix."""
    sides = []
    for head, side in ((before, rule.sources), (after, rule.targets)):
        texts = [one.text.removeprefix(_ANY_PREFIX) for one in side]
        sides.append([f"{head}.{text}" if head else text for text in texts])
    return _rule(sides[0], sides[1], rule.steps, rule.only)


def _entries(given: object) -> Iterator[dict[str, Any]]:
    """Yield the entries of ``each``: tables, or every combination of several lists of tables."""
    listed = given if isinstance(given, list) else []
    lists = listed if listed and all(isinstance(one, list) for one in listed) else [listed]
    if not all(isinstance(one, dict) for tables in lists for one in tables) or not all(lists):
        raise ValueError("each is not a list of tables, and no list of such lists")
    if prod(map(len, lists)) > _MOST_RULES:
        raise ValueError(f"more than {_MOST_RULES:,} rules")
    for tables in product(*lists):
        yield {key: text for table in tables for key, text in table.items()}


def _texts(value: object, what: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
        raise ValueError(f"{what} is no name, and no list of names")
    return texts


def _steps(table: Mapping[str, Any]) -> Iterator[Step]:
    if "steps" not in table:
        given = {key: value for key, value in table.items() if key not in _ABOUT_RULE}
        own = _PARAMETERS.get(str(table.get("op", "rename")), given)  # an unknown operation is refused below
        _refuse_unknown(table, (*_ABOUT_RULE, "op", "steps", *own), "")
        yield _step({"op": "rename", **given})
        return
    steps = table["steps"]
    _refuse_unknown(table, (*_ABOUT_RULE, "steps"), "")
    if not isinstance(steps, list) or not steps or not all(isinstance(one, dict) for one in steps):
        raise ValueError('steps is not a list of tables, as [{ op = "stack" }]')
    for one in steps:
        if one.get("op") in ("rename", "drop"):
            raise ValueError(f"{one['op']!r} is a rule of its own, and no step")
        yield _step(one)


def _step(given: Mapping[str, Any]) -> Step:
    op = str(given.get("op"))
    if op not in _PARAMETERS:
        raise ValueError(f"there is no operation {op!r}: there are {some(list(OPERATIONS), 12)}")
    _refuse_unknown(given, ("op", *_PARAMETERS[op]), f"{op} ")
    if lacking := [name for name in _NEEDED.get(op, ()) if name not in given]:
        raise ValueError(f"{op} needs {lacking[0]}")
    if op == "transpose":
        given = {"dims": [0, 1], **given}
    found: dict[str, Any] = {"op": op}
    for name in _PARAMETERS[op]:
        if name not in given:
            continue
        value = given[name]
        if name == "dim" and type(value) is not int:
            raise ValueError(f"dim is not an integer: {value!r}")
        if name in ("dim", "heads", "parts"):
            found[name] = value if name == "dim" else _number(value, name)
            continue
        if not isinstance(value, list) or not value:
            raise ValueError(f"{name} is not a list of numbers")
        found[name] = tuple(_number(one, name) for one in value)
    step = Step(**found)
    dims = step.dims
    are_plain = all(type(dim) is int for dim in dims)
    is_wrong = {"transpose": len(dims) != 2 or dims[0] == dims[-1], "permute": {*dims} != {*range(len(dims))}}
    if not are_plain or is_wrong.get(op):
        raise ValueError(f"{op} takes {'two dimensions' if op == 'transpose' else '0 to n-1 in another order'}")
    for name, places in (("order", step.order), ("of", step.of)):
        if len(set(places)) < len(places) or any(type(one) is not int or one < 0 for one in places):
            raise ValueError(f"{name} is not a list of places, from 0")
    if sorted(step.order) != list(range(len(step.order))):
        raise ValueError("order says of each part where it lies: 0 to n-1 in another order")
    if any(side.count(-1) > 1 for side in (step.shape, step.was)):
        raise ValueError("a shape has at most one -1")
    return step


def _check(rule: Rule) -> None:
    """Raise ValueError where variables or steps of a rule do not fit each other."""
    sources, targets, steps = rule.sources, rule.targets, rule.steps
    if not sources:
        raise ValueError("there is no name in from")
    if (steps[0].op == "drop") != (not targets):
        raise ValueError("drop has no to" if targets else "there is no name in to")
    for side in (sources, targets):
        if len({(one.variables, one.many) for one in side}) > 1:
            raise ValueError(f"names of one side have other variables: {some([str(one) for one in side])}")
        if len({one.text for one in side}) < len(side):
            raise ValueError(f"a name is there twice: {some([str(one) for one in side])}")
    if not targets:
        return
    apart = [sorted(one.variables - {one.many}) for one in (sources[0], targets[0])]
    if apart[0] != apart[1]:
        variables = (
            f"{str(side[0])!r} has {', '.join(names) or 'none'}"
            for side, names in zip((sources, targets), apart, strict=True)
        )
        raise ValueError(f"both sides have the same variables: {' and '.join(variables)}; numbers of a list are {{e*}}")
    columns, is_list = len(sources), sources[0].many is not None
    for step in steps:
        _, columns, is_list = after(step, columns, is_list, rule)
    if columns != len(targets) or is_list != (targets[0].many is not None):
        what = f"{rule.does} makes {columns} {'lists' if is_list else 'tensors'}"
        raise ValueError(f"{what}, and to has {len(targets)} names: {some(list(map(str, targets)))}")


def after(step: Step, columns: int, is_list: bool, rule: Rule) -> tuple[StepMode, int, bool]:
    """
    Return how a step maps its inputs, how many tensors come out, and whether each is a list.

    Raises:
        ValueError: The step does not take so many.
    """
    op, wanted = step.op, len(rule.targets)
    if step.of and max(step.of) >= columns:
        raise ValueError(f"{op} is about the tensors {list(step.of)}, and there are {columns}")
    becomes_list = rule.targets[0].many is not None and not is_list
    if op == "stack" and is_list:
        return "lists", columns, False
    if op in ("stack", "concat") and columns > 1:
        _refuse_count(step, columns)
        return "rows", 1, is_list
    if op == "concat" and is_list:
        if step.parts is None:
            raise ValueError("concat of a list needs parts: how many there are")
        return "lists", 1, False
    if op == "unstack" and becomes_list:
        return "to lists", columns, True
    if op == "unstack" and columns == 1:
        return "apart", wanted, is_list
    if op == "split" and columns == 1:
        _refuse_count(step, len(step.sizes))
        return "apart", len(step.sizes), is_list
    if op == "chunk" and columns == 1 and becomes_list and step.parts is not None:
        return "to lists", 1, True
    if op == "chunk" and columns == 1:
        if step.parts is not None and type(step.parts) is not int:
            raise ValueError("chunk into several names has a plain number of parts")
        parts = int(step.parts) if step.parts is not None else len(step.order) or wanted
        _refuse_count(step, parts)
        return "apart", parts, is_list
    if op in ("stack", "concat", "unstack", "split", "chunk"):
        raise ValueError(f"{op} does not take {columns} {'lists' if is_list else 'names'}")
    if op == "rename" and columns != wanted:
        raise ValueError(f"rename takes as many names as it gives, not {columns} and {wanted}")
    return "each", columns, is_list


def _refuse_count(step: Step, parts: int) -> None:
    """Raise ValueError if a step has settings for another number of parts."""
    for name, count in (("sizes", len(step.sizes)), ("order", len(step.order)), ("parts", step.parts)):
        if type(count) is int and count not in (0, parts):
            raise ValueError(f"{step.op} has {name} for {count}, and there are {parts}")
