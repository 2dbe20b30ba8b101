"""The table of verbs: names, other words for them, examples; what click lacks for their options."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

import ckptool.system as system
from ckptool import __version__
from ckptool.messages import as_path, show
from ckptool.sources.paths import file_of, is_likely, near_to

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])

SECTIONS: Final = {
    "Look into a checkpoint": {
        "inspect": "Say what is in checkpoints, without running them.",
        "check": "Say whether checkpoints are whole and safe, and will load.",
        "diff": "Say where two checkpoints differ, in whatever forms they are.",
        "stat": "Say what the values of each tensor are like.",
        "report": "Write a page to look at: what is in a checkpoint, or where two differ.",
        "explain": "Say what an error message means, and what to do.",
    },
    "Look into thousands": {"scan": "Print a line of JSON for every checkpoint in folders and below."},
    "Write one": {
        "migrate": "Write a checkpoint for another device, in another form or with other names.",
        "merge": "Put LoRA adapters into a checkpoint, or write the mean of several.",
        "recipe": "List, show and check recipes: how the tensors of one layout become those of another.",
        "recover": "Undo a 'migrate --in-place' that was cut off.",
    },
    "More": {
        "example": "Write a small checkpoint to try the verbs on.",
        "devices": "Show what torch sees on this machine.",
        "completion": "Print the code with which a shell completes verbs, options and files.",
        "fixtures": "Train a small net briefly and save it in every way.",
    },
}
"""
What the help lists, without an import. Each verb is a command of the same name, in a module of the same name or in the
one below.
"""
_MODULES: Final = {
    **dict.fromkeys(("report", "recipe", "recover", *SECTIONS["More"]), "more"),
    "explain": "check",
    "merge": "migrate",
}
"""The modules of verbs that have none of their own."""
VERBS: Final = tuple(verb for verbs in SECTIONS.values() for verb in verbs)
WORDS: Final = {
    "show": "inspect",
    "info": "inspect",
    "ls": "inspect",
    "list": "inspect",
    "cat": "inspect",
    "open": "inspect",
    "view": "inspect",
    "dump": "inspect",
    "verify": "check",
    "validate": "check",
    "stats": "stat",
    "compare": "diff",
    "page": "report",
    "html": "report",
    "convert": "migrate",
    "average": "merge",
}
"""Other words for verbs. None of them is in the help: one name for one thing."""
GUESSED: Final = {
    **{f"--{device}": f"--to {device}" for device in ("cpu", "cuda", "mps", "xpu")},
    "--gpu": "--to cuda",
    "--device": "--to",
    "--map-location": "--to",
    "--workers": "--jobs",
    **{f"--{name}": f"--dtype {name}" for name in ("half", "fp16", "float16", "bf16", "bfloat16", "fp32", "float32")},
}
"""Options that people try for those of ``migrate``. None of them is in the help: one name for one thing."""
LIKE: Final = {
    **dict.fromkeys(("--tolerance", "--tol", "--eps"), "--atol"),
    **dict.fromkeys(("--safe", "--safety", "--security"), "--only safe"),
    "--strip": "--strip-module",
    **dict.fromkeys(("--values", "--stats", "--statistics"), "stat"),
}
"""Other options that people try, and what they mean; their spelling alone would suggest something else."""
GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "migrate": {
        "What to write": "form max_shard_size config_from model model_arguments expand_tied set_metadata drop_metadata "
        "optimizer_names",
        "What to take": "key weights include exclude drop drop_unsupported keep_calls",
        "Names": "strip_module strip_wrappers strip_prefix add_prefix rename rename_file",
        "Another layout": "recipe reverse recipe_arguments like join cut",
        "Devices and types": "to dtype keep_dtype saturate dequantize break_quantized",
        "What is refused otherwise": "allow_empty allow_missing allow_unmatched force",
        "How it is written": "in_place compact deep no_reflink no_verify dry_run",
        "Many, and far away": "out_dir jobs ray endpoint region anonymous connections download",
        "Output": "brief quiet as_json as_lines",
    }
}
"""How the help of a verb with many options lists them: by heading."""
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
        ("brief", "is a line for each file", ("show_globals", "digest")),
    ),
    "diff": (
        ("no_values", "leaves the values out", ("rtol", "atol", "stat")),
        ("quiet", "prints the verdict alone", ("stat",)),
    ),
    "stat": (("as_json", "is an object with all about a file", ("table_format", "limit")),),
    "migrate": (("in_place", "edits the file itself", ("out_dir", "force", "no_verify", "no_reflink")),),
    "merge": (("average", "counts each file by --shares", ("scale",)),),
}
"""By verb: an option, what it does, and the options that then have no effect."""

# fmt: off
EXAMPLES: Final = {
    "inspect": (
        "ckptool model.pth                            what is in it, tensor by tensor",
        "ckptool inspect -b -r runs                   a line for each checkpoint below",
        "ckptool inspect model.pth --sort size        the largest tensors first",
    ),
    "check": (
        "ckptool check model.pth                      is it whole, is it safe, will it load",
        "ckptool check -b -r runs                     a line for each checkpoint below",
        "ckptool check --deep model.pth               read every byte, and compare checksums",
        "ckptool check model.pth --model net.py:Net   does it fit this class",
    ),
    "diff": (
        "ckptool diff a.pth b.safetensors             are the weights the same",
        "ckptool diff a.pth b.pth --atol 1e-6         the same but for rounding",
        "ckptool diff epoch1.pth epoch2.pth --stat    how far apart: cosine, norms",
    ),
    "stat": (
        "ckptool stat model.pth                       mean, range, zeros and a histogram of each tensor",
        "ckptool stat model.pth --depth 1             of each module",
    ),
    "report": (
        "ckptool report model.pth -o model.html       what is in it, by module and in a table",
        "ckptool report model.pth --values -o m.html  and what its values are like",
        "ckptool report a.pth b.pth -o ab.html        what differs, and by how much",
    ),
    "scan": (
        "ckptool scan runs -o runs.jsonl              a line of JSON for each checkpoint below",
        "ckptool scan runs --digest -o runs.jsonl     which are copies of each other",
        "ckptool scan s3://models -o models.jsonl     those in a bucket, many at once",
        "find / -name '*.pt' | ckptool scan -         those that another program has found",
    ),
    "explain": (
        'ckptool explain "Weights only load failed"   what the message means',
        "python train.py 2>&1 | ckptool explain -     whatever was printed",
        'ckptool explain "Missing key(s)…" model.pth  and what in the file causes it',
    ),
    "migrate": (
        "ckptool migrate gpu.pth --to cpu             everything, for the CPU",
        "ckptool migrate last.ckpt model.safetensors  the weights alone",
        "ckptool migrate ddp.pth --strip-module       names without 'module.'",
        "ckptool migrate big.pth --to cpu --in-place  the file itself, without a copy",
    ),
    "merge": (
        "ckptool merge model.safetensors --lora style.safetensors -o merged.safetensors",
        "ckptool merge model.safetensors --lora style.safetensors=0.7 --lora lines.safetensors -o merged.safetensors",
        "ckptool merge --average epoch1.pth epoch2.pth epoch3.pth -o mean.pth",
    ),
    "recover": ("ckptool recover model.pth                    undo an edit that was cut off",),
    "completion": (
        'eval "$(ckptool completion bash)"            in ~/.bashrc',
        'eval "$(ckptool completion zsh)"             in ~/.zshrc, after compinit',
        "ckptool completion fish | source             in ~/.config/fish/config.fish",
        "ckptool completion powershell | Out-String | Invoke-Expression    in $PROFILE",
    ),
}
# fmt: on

_GAP: Final = r" {2,}"
"""The blanks between an example and what it does."""
_COLOR: Final = "--color"
_HELP: Final = ("-h", "--help")
_VERSION: Final = ("-V", "--version")


GIVEN: Final = "ckptool.words"
"""Key of a click context for the command line as it was given."""
ORDER: Final = "ckptool.order"
"""Key of a click context for the names of the parameters that were given, in order."""


def flag(*names: str, says: str) -> Callable[[F], F]:
    """Return a decorator that adds an option without a value to a verb."""
    return click.option(*names, is_flag=True, help=says)


def takes(name: str, value: str, says: str, *, multiple: bool = False) -> Callable[[F], F]:
    """Return a decorator that adds an option with a text, called ``value`` in the help, to a verb."""
    return click.option(name, metavar=value, help=says, multiple=multiple)


def together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds several options to a verb, in this order."""
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


def color_option(*, hidden: bool = False) -> Callable[[F], F]:
    """Return a decorator that adds ``--color``: before the verb, or after it, where people put it, too."""

    def choose(ctx: click.Context, _param: click.Parameter, asked: str | None) -> None:
        if asked is not None:
            ctx.color = ctx.find_root().color = None if asked == "auto" else asked == "always"

    says = "Colours; auto, the default, uses them on a terminal."
    kind = click.Choice(["auto", "always", "never"])
    return click.option("--color", type=kind, expose_value=False, callback=choose, help=says, hidden=hidden)


class Command(click.Command):
    """A verb that refuses empty values, and several values for an option that takes one."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, in groups if there are many."""
        groups = GROUPS.get(self.name or "")
        if groups is None:
            super().format_options(ctx, formatter)
            return
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        records = {one.name: record for one in options if (record := one.get_help_record(ctx)) is not None}
        for heading, names in groups.items():
            with formatter.section(heading):
                formatter.write_dl([records.pop(name) for name in names.split()])
        with formatter.section("More"):
            formatter.write_dl(list(records.values()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the examples of the verb, as they are."""
        if self.name in EXAMPLES:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in EXAMPLES[self.name]))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments."""
        given, _, order = self.make_parser(ctx).parse_args(list(args)) if not ctx.resilient_parsing else ({}, [], [])
        ctx.meta[ORDER] = [one.name for one in order]
        for one in order:
            if not isinstance(one, click.Option) or one.is_flag:
                continue
            if order.count(one) > 1 and not one.multiple:
                raise click.UsageError(f"{one.opts[-1]} is given {order.count(one)} times: it takes one value.", ctx)
            if "" in (given[one.name] if one.multiple else [given[one.name]]):
                raise click.UsageError(f"{one.opts[-1]} is given an empty value: leave it out, or fill it in.", ctx)
        if not system.SHELLS_EXPAND:
            from ckptool.formats.listing import matches  # most shells have done it

            words = [given[one.name] for one in order if isinstance(one, click.Argument)]
            paths = {path for word in words for path in (word if isinstance(word, tuple | list) else [word])}
            args = [path for word in args for path in (matches(word) if word in paths else [word])]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb, unless options were given that would do nothing."""
        _refuse_useless_options(ctx)
        return super().invoke(ctx)


def _refuse_useless_options(context: click.Context) -> None:
    """Refuse options that would do nothing beside another one that was given."""
    given = {
        one.name: one.opts[-1] if isinstance(one, click.Option) else str(one.metavar)
        for one in context.command.params
        if one.name and context.get_parameter_source(one.name) is ParameterSource.COMMANDLINE
    }
    if "as_json" in given and "as_lines" in given:
        context.fail("--json and --jsonl are two forms: give one of them.")
    given |= {"as_json": given["as_lines"]} if "as_lines" in given else {}
    if (
        "output" in given
        and "as_lines" in (one.name for one in context.command.params)
        and given.keys().isdisjoint(("as_json", "as_sarif"))
    ):
        context.fail("-o takes what --json and the like print: give one of them, too.")
    if (
        "output" in given and not {"as_json", "as_sarif"} <= given.keys()
    ):  # the text is printed, too, and OUT has digests
        in_both = ("as_json", "as_lines", "as_sarif", "digest")
        given = {name: option for name, option in given.items() if name not in in_both}
    for owner, does, others in _IDLE.get(context.command.name or "", ()):
        idle = next((name for name in others if name in given and name != owner), None) if owner in given else None
        if idle is not None:
            context.fail(f"{given[owner]} {does}: {given[idle]} would do nothing. Give one of them.")
    if "no_fold" in given and given.keys().isdisjoint(("tree", "depth")):
        context.fail("--no-fold is about the tree: give --tree, too.")


class Verbs(Command, click.Group):
    """A group that imports a verb's module only when the verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        verb = WORDS.get(cmd_name, cmd_name)
        if verb not in VERBS:
            return None
        command: click.Command = getattr(import_module(f"ckptool.cli.{_MODULES.get(verb, verb)}"), verb)
        if not any(one.name == "version" for one in command.params):  # where people who see a verb's help look for it
            click.version_option(__version__, *_VERSION, prog_name="ckptool", hidden=True)(command)
            color_option(hidden=True)(command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Treat files without a verb as files to inspect; a verb is never taken for a file."""
        at = 0
        while at < len(args) and args[at].partition("=")[0] == _COLOR:  # the option that comes before any verb
            at += 1 if "=" in args[at] else 2
        own, rest = args[:at], args[at:]
        ctx.meta[GIVEN] = list(rest)
        if rest[:1] == ["version"] and not _is_path("version"):
            rest = ["--version"]
        elif rest[:1] == ["help"] and not _is_path("help"):
            rest = [*rest[1:2], "--help"]
        verb = next((word for word in rest if not word.startswith("-")), None)
        if verb in (*VERBS, *WORDS) and not _is_path(verb):  # with options before it
            rest.remove(verb)
            rest = [verb, *rest]
        if rest and rest[0] not in (*VERBS, *WORDS, *_HELP, *_VERSION):
            # Of words without a verb, the first is a file, or is an option, with files after it.
            is_meant = any(map(_is_path, rest if rest[0].startswith("-") else rest[:1]))
            is_meant = is_meant or (rest[0].startswith("-") and any(map(near_to, rest)))
            rest = ["inspect", *rest] if is_meant else rest
        return super().parse_args(ctx, [*own, *rest])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete verbs, or files if no verb begins so, because a file needs no verb."""
        from click.shell_completion import CompletionItem

        return super().shell_complete(ctx, incomplete) or [CompletionItem(incomplete, type="file")]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the verb that the first word names; answer a misspelt one with the nearest."""
        word = args[0]
        if not ctx.resilient_parsing and self.get_command(ctx, word) is None:
            ctx.fail(f"{word!r} is no verb, and no file that is there. {_hint(word)}")
        name, command, rest = super().resolve_command(ctx, args)
        return (command.name if command is not None else name), command, rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; the error for an option that it does not have suggests only the nearest one."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            self._refuse_guess(ctx, error)
            nearest = list(error.possibilities or ())[:1]
            named = error.option_name.lstrip("-")
            own = [name for one in error.ctx.command.params for name in one.opts] if error.ctx is not None else []
            meant = named if named in VERBS else LIKE.get(error.option_name, "")
            if meant in VERBS or meant.split(" ")[0] in own:
                fact = f"No such option '{error.option_name}'. Did you mean '{meant}'?"
                raise click.UsageError(fact, error.ctx) from None
            raise click.NoSuchOption(error.option_name, possibilities=nearest, ctx=error.ctx) from None
        except click.MissingParameter as error:
            examples = EXAMPLES.get(ctx.invoked_subcommand or "")
            like = f" For example: {re.split(_GAP, examples[0])[0]}" if examples else ""
            raise click.UsageError(f"{error.format_message()}{like}", error.ctx) from None
        except click.BadParameter as error:
            text = error.message.replace("valid integer range", "whole number")
            raise click.BadParameter(text, error.ctx, error.param, error.param_hint) from None

    def _refuse_guess(self, ctx: click.Context, error: click.NoSuchOption) -> None:
        """Raise an error with the complete command for an option of ``migrate``, or what people try for one."""
        option = GUESSED.get(error.option_name, error.option_name)
        if ctx.invoked_subcommand == "migrate" and option in ("-o", "--output", "--out"):
            raise click.UsageError(f"No such option '{option}'. DST is the second path, without an option.", error.ctx)
        migrate = self.get_command(ctx, "migrate") if ctx.invoked_subcommand in ("migrate", "inspect") else None
        if migrate is None or not any(option.split()[0] in one.opts for one in migrate.params):
            return

        if ctx.invoked_subcommand == "inspect" and option == "--key":
            raise click.UsageError(
                "No such option '--key': --all shows everything, and --include some names.", error.ctx
            )
        words = list(ctx.meta[GIVEN])
        verb = next((word for word in words if word in (*VERBS, *WORDS) and not _is_path(word)), None)
        if verb is not None:
            words.remove(verb)
        meant: list[str] = []
        for name, equals, value in (word.partition("=") for word in words):
            meant += GUESSED[name].split() if name in GUESSED else [name]
            meant[-1] += equals + value
        did_you = f"Did you mean '{option}'?" if option != error.option_name else "It is one of 'ckptool migrate'."
        command = show(system.command_line("ckptool", "migrate", *meant))
        raise click.UsageError(f"No such option '{error.option_name}'. {did_you}\nRun: {command}", error.ctx)

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the verbs, by what they are for."""
        width = max(map(len, VERBS))
        for section, verbs in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(verb.ljust(width), does) for verb, does in verbs.items()])


def _hint(word: str) -> str:
    """Return a text on what was probably meant by a word that is not a verb."""
    if word == "load":
        return "To load weights, call ckptool.load(path) or ckptool.load_into(model, path) in Python."
    from difflib import get_close_matches  # most words are verbs, or files

    if (file := near_to(word)) is not None:
        return f"Did you mean the file {as_path(file)}?"
    near = get_close_matches(word, [*VERBS, *WORDS], n=1)
    return f"Did you mean '{WORDS.get(near[0], near[0])}'?" if near else f"The verbs are {', '.join(VERBS)}."


def _is_path(word: str) -> bool:
    """Return whether a word is the path of a file, or of a member of one: it exists, or can be nothing else."""
    is_path = word.startswith(".") or "/" in word or os.sep in word or ("*" in word and not system.SHELLS_EXPAND)
    looks_so = not word.startswith("-") and (is_path or is_likely(word.partition("::")[0]))
    return word == "-" or looks_so or os.path.lexists(file_of(word))
