"""
Options that several verbs share, ``--pager`` and ``--ray`` among them; paths and addresses as arguments.

Options on how remote files are reached are read before any path.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import click

from ckptool.cli.verbs import Command, F, flag, takes, together

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_ASKED: Final = "ckptool.remote"
"""Key of a click context for the options on how remote files are reached."""


class AnyPath(click.Path):
    """
    A path as it was given; an address gets the options on how remote files are reached. ``click.Path`` would ask the
    system about it, which takes no NUL.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ARG002
        asked = ctx.meta.get(_ASKED) if ctx is not None else None
        if asked and isinstance(value, str) and "://" in value:
            from ckptool.sources.address import Remote  # few files are remote

            return Remote(value, **asked)
        return value


def _ask(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value not in (None, False):
        ctx.meta.setdefault(_ASKED, {})[param.name] = value


def _of_reach(name: str, says: str, **how: Any) -> Callable[[F], F]:
    return click.option(name, expose_value=False, is_eager=True, callback=_ask, help=says, **how)


reach_options = together(
    _of_reach("--endpoint", "Address of the store for s3://, gs:// and az://, or of the hub for hf://.", metavar="URL"),
    _of_reach("--region", "Region of a bucket of s3://.", metavar="NAME"),
    _of_reach("--anonymous", "Use no keys: for what everybody may read.", is_flag=True),
)
"""Options on where stores are, and whether keys are used."""
_HOW_MANY: Final = "Fetch N parts of 6 MiB at once; by default 16."
remote_options = together(
    reach_options,
    _of_reach("--connections", _HOW_MANY, type=click.IntRange(1, 64), metavar="N"),
    _of_reach("--download", "Fetch into a temporary file what https:// gives only as a whole.", is_flag=True),
)
"""Options on how remote files are reached."""


def choices(found: Callable[[], Iterable[str]], *, is_list: bool = False) -> Callable[..., list[CompletionItem]]:
    """Return a function that completes a value by one of several; with ``is_list``, the last one after a comma."""

    def complete(_ctx: click.Context, _param: click.Parameter, typed: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        before, comma, last = typed.rpartition(",") if is_list else ("", "", typed)
        return [CompletionItem(f"{before}{comma}{one}") for one in found() if one.startswith(last)]

    return complete


brief_option = flag("-b", "--brief", says="Print one line for each file, and a total.")


def pairs_of(option: str, given: Iterable[str]) -> dict[str, str]:
    """Return the values of ``K=V`` as text, by key."""
    if wrong := [text for text in given if not text.partition("=")[0] or "=" not in text]:
        raise click.BadParameter(f"not of the form K=V: {wrong[0]!r}", param_hint=option)
    pairs = [text.split("=", 1) for text in given]
    if twice := [key for key, many in Counter(key for key, _ in pairs).items() if many > 1]:
        raise click.BadParameter(f"{twice[0]!r} is given twice", param_hint=option)
    return dict(pairs)


def _arguments(_ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, object]:
    """Return the values of ``K=V`` as Python literals, or else as text, by key."""
    found: dict[str, object] = {}
    for name, value in pairs_of(param.opts[0], given).items():
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def _numbers(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, object]:
    found = _arguments(ctx, param, given)
    if wrong := [name for name, value in found.items() if type(value) is not int]:
        raise click.BadParameter(f"{wrong[0]} is no whole number", param_hint=param.opts[0])
    return found


model_arg_option = click.option(
    "--model-arg",
    "model_arguments",
    multiple=True,
    metavar="K=V",
    callback=_arguments,
    help="Argument for --model: a Python literal, or text.",
)
recipe_options = together(
    takes("--recipe", "NAME|FILE", "Put the weights into another layout: see 'ckptool recipe list'."),
    flag("--reverse", says="Go the way back of --recipe."),
    click.option(
        "--recipe-arg",
        "recipe_arguments",
        multiple=True,
        metavar="K=N",
        callback=_numbers,
        help="A number for --recipe that no config.json beside the file says. Repeatable.",
    ),
)
many_files = together(
    flag(
        "-r", "--recursive", says="Take every checkpoint in a folder and below; the files of one checkpoint count once."
    ),
    flag("--json", "as_json", says="Print one JSON object for each file; a list if there are several."),
    flag("--jsonl", "as_lines", says="Print a line of JSON for each file, as it comes."),
    click.option("-o", "--output", metavar="OUT", help="Write the JSON to OUT, and print what is for people."),
)
"""Options of verbs that inspect any number of files, one after the other."""
pager_option = flag("--pager", says="Show everything in a pager.")
LOCAL: Final = "local"
_ADDRESS: Final = re.compile(r"(ray://.+|[\w.-]+:\d+|\[[0-9a-fA-F:]+\]:\d+|auto|local)")
"""What may follow ``--ray``: anything else is the next argument."""


class RayCommand(Command):
    """A command with ``--ray``, which an address may follow, or the next argument."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        for index in range(end):
            if args[index] == "--ray" and not (index + 1 < end and _ADDRESS.fullmatch(args[index + 1])):
                args[index] = f"--ray={LOCAL}"
        return super().parse_args(ctx, args)


def ray_option(what: str) -> Callable[[F], F]:
    """Return a decorator that adds ``--ray`` to a ``RayCommand``."""
    return takes("--ray", "[ADDRESS]", f"{what} on Ray: the one at ADDRESS, or one that is started here.")
