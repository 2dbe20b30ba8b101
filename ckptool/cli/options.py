"""
Options that several verbs share; paths and addresses as arguments.

Options on how remote files are reached are read before any path.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from ckptool.cli.verbs import Command, F, flag, takes, together

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_PATTERNS: Final = ("grep", "include", "exclude")
_TREE: Final = ("tree", "depth", "no_fold")
_HOW: Final = ("table_format", "limit", "columns", "sort", *_TREE)
_LISTED: Final = (*_PATTERNS, *_HOW, "show_all")
"""Options on which tensors of a file to list, and how."""
_ALONE: Final = ("show_source", "show_skeleton", "show_metadata", "show_globals")
"""Options that leave everything else out."""
_OF_FILES: Final = (
    *("deep", "values", "strict", "device_check", "like", "model", "key", "show_globals", "only", "quiet", "output"),
    *("digest", "fail_on", "policy", "allow", "ignore", "baseline", "brief", "as_lines", "as_sarif"),
)

_IDLE: Final[dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]]] = {
    "inspect": (
        ("brief", "is a line for each file", (*_LISTED, *_ALONE, "digest")),
        ("show_source", "prints source code alone", (*_LISTED, *_ALONE, "quiet", "digest")),
        ("show_skeleton", "prints code alone", (*_LISTED, *_ALONE, "quiet", "digest")),
        ("show_metadata", "prints metadata alone", (*_LISTED, *_ALONE, "quiet", "digest")),
        ("show_globals", "lists names of code alone", (*_LISTED, "quiet", "digest")),
        ("table_format", "is the table alone", (*_TREE, "show_all", "quiet", "digest")),
        (
            "as_json",
            "is an object with all about a file",
            ("table_format", "limit", "columns", "show_source", "show_skeleton", "show_metadata", *_TREE),
        ),
        ("quiet", "leaves the list out", ("limit", "columns", "sort", *_TREE)),
        ("tree", "has no columns", ("columns",)),
        ("depth", "makes a tree, which has no columns", ("columns",)),
    ),
    "check": (
        ("list_codes", "lists codes, and looks into no file", ("files", "explain", *_OF_FILES)),
        ("explain", "explains a message", _OF_FILES),
        ("as_sarif", "is one form of output", ("as_json", "as_lines", "brief", "quiet", "show_globals", "digest")),
        ("as_json", "is an object with all about a file", ("quiet",)),
        ("brief", "is a line for each file", ("show_globals",)),
    ),
    "diff": (
        ("no_values", "leaves the values out", ("rtol", "atol", "stat")),
        ("quiet", "prints the verdict alone", ("stat",)),
    ),
    "stat": (("as_json", "is an object with all about a file", ("table_format", "limit")),),
    "migrate": (("in_place", "edits the file itself", ("out_dir", "force", "no_verify", "no_reflink")),),
}
"""By verb: an option, what it does, and the options that then have no effect."""

_ASKED: Final = "ckptool.remote"
"""Key of a click context for the options on how remote files are reached."""


class AnyPath(click.Path):
    """A path as it was given; ``click.Path`` asks the system about it, which takes no NUL."""

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


def with_remote_options(path: str) -> str:
    """Return a path from a list; an address gets the options on how remote files are reached."""
    found: str = AnyPath().convert(path, None, click.get_current_context())
    return found


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
        callback=_arguments,
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


def refuse_useless_options() -> None:
    """Refuse options that would do nothing beside another one that was given."""
    context = click.get_current_context()
    given = {
        one.name: one.opts[-1] if isinstance(one, click.Option) else str(one.metavar)
        for one in context.command.params
        if one.name and context.get_parameter_source(one.name) is ParameterSource.COMMANDLINE
    }
    if "as_json" in given and "as_lines" in given:
        raise click.UsageError("--json and --jsonl are two forms: give one of them.")
    given |= {"as_json": given["as_lines"]} if "as_lines" in given else {}
    if (
        "output" in given
        and "as_json" in (one.name for one in context.command.params)
        and given.keys().isdisjoint(("as_json", "as_sarif"))
    ):
        raise click.UsageError("-o takes what --json and the like print: give one of them, too.")
    if "output" in given and not {"as_json", "as_sarif"} <= given.keys():  # the text is printed, too
        given = {name: option for name, option in given.items() if name not in ("as_json", "as_lines", "as_sarif")}
    for owner, does, others in _IDLE.get(context.command.name or "", ()):
        idle = next((name for name in others if name in given and name != owner), None) if owner in given else None
        if idle is not None:
            raise click.UsageError(f"{given[owner]} {does}: {given[idle]} would do nothing. Give one of them.")
    if "no_fold" in given and given.keys().isdisjoint(("tree", "depth")):
        raise click.UsageError("--no-fold is about the tree: give --tree, too.")


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
