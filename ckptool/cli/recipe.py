"""``ckptool recipe``: the recipes that come with it, what they do, and whether one of your own is right."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import click

from ckptool.cli.printing import print_json, with_hints
from ckptool.cli.text import error_text, say, say_sections
from ckptool.cli.verbs import Command, flag
from ckptool.errors import Failure
from ckptool.messages import show
from ckptool.recipes.find import named_recipes, read_recipe
from ckptool.recipes.recipe import Recipe, Rule
from ckptool.sections import Section, Table

SCHEMA: Final = "ckptool.recipe/1"
_NAMES: Final = "NAME|FILE…"


@click.command(cls=Command)
@click.argument("what", metavar="list|show|check", type=click.Choice(["list", "show", "check"]))
@click.argument("recipes", metavar=_NAMES, nargs=-1)
@flag("--reverse", says="Show the way back.")
@flag("--json", "as_json", says="Print one JSON object.")
def recipe(what: str, recipes: tuple[str, ...], *, reverse: bool, as_json: bool) -> None:
    """
    List, show and check recipes: how the tensors of one layout become those of another.

    'list' says which come with ckptool, 'show' prints the rules of some, and 'check' says whether recipes of your own
    are right, without a checkpoint. 'ckptool migrate SRC DST --recipe NAME' uses one; with --dry-run it says what would
    become of each tensor. Exit code 1: one is wrong.
    """
    if (what == "list") != (not recipes):
        raise click.UsageError("'list' takes no recipe" if recipes else f"'{what}' takes recipes: {_NAMES}")
    if reverse and what != "show":
        raise click.UsageError("--reverse is for 'show'")
    found, wrong = list[Recipe](), list[Failure]()
    for given in recipes or named_recipes():
        try:
            one = read_recipe(given)
            found.append(one.reversed if reverse else one)
        except Failure as error:
            wrong.append(error)
    if as_json:
        listed = [_as_dict(one, with_rules=what != "list") for one in found]
        print_json(with_hints({"schema": SCHEMA, "recipes": listed, "errors": [one.as_dict() for one in wrong]}))
    elif what == "list":
        say_sections(_listed(found), None)
    else:
        for one in found:
            if what == "show":
                say_sections(_shown(one), None)
            else:
                say(_checked(one))
        for failure in wrong:
            say(error_text(failure), err=True)
    sys.exit(1 if wrong else 0)


def _listed(found: list[Recipe]) -> Iterator[Section]:
    yield Table(("recipe", "what it does"), [(one.name, one.about) for one in found], [False, False])


def _checked(one: Recipe) -> str:
    has_way_back = all(rule.targets or rule.only == "forward" for rule in one.rules)
    needs = f", needs {', '.join(one.numbers)}" if one.numbers else ""
    return f"{show(one.name)}: fine, {len(one.rules):,} rules{needs}{'' if has_way_back else ', and no way back'}"


def _shown(one: Recipe) -> Iterator[Section]:
    yield show(f"{one.name}: {one.about}" if one.about else one.name)
    if one.source:
        yield show(f"source: {one.source}")
    if one.numbers:
        yield f"numbers: {', '.join(one.numbers)}"
    rows = [(" + ".join(map(str, rule.sources)), _does(rule), " + ".join(map(str, rule.targets))) for rule in one.rules]
    yield Table(("from", "what", "to"), [tuple(map(show, row)) for row in rows], [False] * 3)


def _does(rule: Rule) -> str:
    return f"{rule.does}, only {rule.only}" if rule.only else rule.does


def _as_dict(one: Recipe, *, with_rules: bool) -> dict[str, Any]:
    head: dict[str, Any] = {"name": one.name, "about": one.about, "source": one.source}
    head |= {"from": one.sides[0], "to": one.sides[1], "numbers": one.numbers, "keeps_rest": one.keeps_rest}
    rules = [
        {"from": [str(name) for name in rule.sources], "does": _does(rule), "to": [str(name) for name in rule.targets]}
        for rule in one.rules
    ]
    return {**head, "rules": rules} if with_rules else head
