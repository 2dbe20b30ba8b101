"""Small verbs: ``report``, ``recipe``, ``recover``, ``devices``, ``example``, ``completion``, ``fixtures``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

import ckptool.system as system
from ckptool.cli.options import AnyPath, remote_options
from ckptool.cli.text import ProgressLine, advised, error_text, say, say_sections
from ckptool.cli.verbs import Command, flag, takes
from ckptool.errors import CkptoolError, Failure, MigrationRefused, MissingPackage, UnsupportedFeature
from ckptool.messages import show, show_nbytes
from ckptool.sections import Section, Table
from ckptool.sources.paths import command_line, shown_path

if TYPE_CHECKING:
    from ckptool.recipes.recipe import Recipe, Rule


@click.command(cls=Command)
@click.argument("file", metavar="FILE", type=AnyPath())
@click.argument("other", metavar="[OTHER]", required=False, type=AnyPath())
@click.option("-o", "--output", required=True, metavar="PAGE", type=AnyPath(), help="Write the page here.")
@click.option(
    "--values/--no-values",
    default=None,
    help="Also show statistics and histograms of the values and, for two files, how alike tensors are. Needs numpy. "
    "The values of two files are compared in any case, unless --no-values is given.",
)
@takes("--key-a", "PATH", "Which state dict of FILE to compare with OTHER.")
@takes("--key-b", "PATH", "Which state dict of OTHER to compare.")
@flag("--ignore-wrappers", says="Compare names without what training wrappers added to them.")
@flag("--digest", says="Read all of each file; show its SHA-256 and the digest of its weights at the foot.")
@flag("--force", says="Overwrite what exists.")
@remote_options
def report(file: str, other: str | None, output: str, *, digest: bool, **options: Any) -> None:
    """
    Write a page to look at: what is in a checkpoint, or where two differ.

    The page is one file of HTML that needs no network. It shows what the file is, what is notable about it, with
    commands to copy, its modules by size, and all tensors in a table to search and sort. With OTHER, it shows what
    differs and by how much. The same files make the same page. Exit code 2 means that a file could not be read; if it
    exists, the page says why. Nobody may read the page who may not read the files.
    """
    from ckptool.cli.page.report import report as write_page

    if other is None and any(options[name] for name in ("key_a", "key_b", "ignore_wrappers")):
        raise click.UsageError("--key-a, --key-b and --ignore-wrappers are about two files: give OTHER, too.")
    line = ProgressLine()
    line.next(other or file)
    try:
        error = write_page(file, output, other, digest=digest, progress=line, **options)
    except ValueError as refused:
        raise click.BadParameter(str(refused), param_hint="--output") from refused
    finally:
        line.clear()
    if error is not None:
        say(error_text(error), err=True)
    say(f"{show(output)}: written")
    sys.exit(0 if error is None else 2)


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
    from ckptool.cli.printing import print_json, with_hints
    from ckptool.recipes.find import named_recipes, read_recipe

    if (what == "list") != (not recipes):
        raise click.UsageError("'list' takes no recipe" if recipes else f"'{what}' takes recipes: {_NAMES}")
    if reverse and what != "show":
        raise click.UsageError("--reverse is for 'show'")
    found: list[Recipe] = []
    wrong: list[Failure] = []
    for given in recipes or named_recipes():
        try:
            one = read_recipe(given)
            found.append(one.reversed if reverse else one)
        except Failure as error:
            wrong.append(error)
    if as_json:
        listed = [_recipe_object(one, with_rules=what != "list") for one in found]
        print_json(
            with_hints({"schema": "ckptool.recipe/1", "recipes": listed, "errors": [one.as_dict() for one in wrong]})
        )
    elif what == "list":
        rows = [(one.name, one.about) for one in found]
        say_sections([Table(("recipe", "what it does"), rows, [False, False])], None)
    else:
        for one in found:
            say_sections(_rules_of(one) if what == "show" else [_checked(one)], None)
        for failure in wrong:
            say(error_text(failure), err=True)
    sys.exit(1 if wrong else 0)


def _checked(one: Recipe) -> str:
    has_way_back = all(rule.targets or rule.only == "forward" for rule in one.rules)
    needs = f", needs {', '.join(one.numbers)}" if one.numbers else ""
    return f"{show(one.name)}: fine, {len(one.rules):,} rules{needs}{'' if has_way_back else ', and no way back'}"


def _rules_of(one: Recipe) -> Iterator[Section]:
    yield show(f"{one.name}: {one.about}" if one.about else one.name)
    if one.source:
        yield show(f"source: {one.source}")
    if one.numbers:
        yield f"numbers: {', '.join(one.numbers)}"
    rows = [(" + ".join(map(str, rule.sources)), _does(rule), " + ".join(map(str, rule.targets))) for rule in one.rules]
    yield Table(("from", "what", "to"), [tuple(map(show, row)) for row in rows], [False] * 3)


def _does(rule: Rule) -> str:
    return f"{rule.does}, only {rule.only}" if rule.only else rule.does


def _recipe_object(one: Recipe, *, with_rules: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"name": one.name, "about": one.about, "source": one.source}
    found |= {"from": one.sides[0], "to": one.sides[1], "numbers": one.numbers, "keeps_rest": one.keeps_rest}
    if with_rules:
        found["rules"] = [
            {"from": [*map(str, rule.sources)], "does": _does(rule), "to": [*map(str, rule.targets)]}
            for rule in one.rules
        ]
    return found


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=AnyPath())
def recover(files: tuple[str, ...]) -> None:
    """
    Undo a 'migrate --in-place' that was cut off.

    The bytes that the edit overwrote are in a journal beside the file, '.FILE.ckptool-undo'. They are written back, and
    the journal is removed. A file that is whole stays as it is, before the edit or after it. One that is being edited
    now is left alone, and so is one that was saved over since, or has no journal that counts: a regular file of root,
    of the owner of FILE or of yourself, which nobody else may write.

    Exit code 1: refused; 2: could not be done.
    """
    from ckptool.migration.output.editing import recover as recover_file

    code = 0
    for path in files:
        try:
            done = recover_file(path)
        except CkptoolError as error:
            error.path = shown_path(error.path or path)
            code = max(code, 1 if isinstance(error, MigrationRefused) else 2)
            say(error_text(error), err=True)
            continue
        undone = f"what the edit had changed is as before it, {show_nbytes(done)} written back; whether anybody else "
        undone += "wrote to the rest of the file meanwhile is not known"
        whole = "it is whole, and was not changed: no edit had begun, or all of it was written"
        command = command_line(path, "check", deep=True) if done else None
        say(advised(f"{path}: {undone if done else whole}", command=command))
    sys.exit(code)


_DEVICES_SCHEMA = "ckptool.devices/1"


@click.command(cls=Command)
@flag("--json", "as_json", says="Print one JSON object.")
def devices(*, as_json: bool) -> None:
    """
    Show what torch sees on this machine.

    Lists every device with its name, free and total memory and compute capability. Says why if CUDA is missing. Needs
    torch.
    """
    from ckptool.cli.printing import print_json, with_hints
    from ckptool.torch_ops import devices as torch_devices

    try:
        report = torch_devices.devices(os.environ.get("CUDA_VISIBLE_DEVICES"))
    except MissingPackage as error:
        if not as_json:
            raise
        print_json(with_hints({"schema": _DEVICES_SCHEMA, "error": error.as_dict()}))
        sys.exit(2)
    if as_json:
        listed = [{"device": one.pop("tag"), **one} for one in map(asdict, report.devices)]
        missing = report.cuda_missing and asdict(report.cuda_missing)
        head = {"schema": _DEVICES_SCHEMA, "torch": report.torch_version, "cuda_build": report.cuda_build}
        print_json({**head, "devices": listed, "cuda_missing": missing})
        return
    built = f", built for CUDA {report.cuda_build}" if report.cuda_build else ""
    rows = []
    for one in report.devices:
        sizes = ("-" if size is None else f"{size / 2**30:,.1f} GiB" for size in (one.free_nbytes, one.total_nbytes))
        rows.append((one.tag, one.name, *sizes, one.compute_capability or "-"))
    table = Table(("device", "name", "free", "total", "compute capability"), rows, [False] * 5)
    say_sections([f"torch {report.torch_version}{built}", "", table], None)
    if report.cuda_missing:
        say_sections(["", f"No CUDA: {report.cuda_missing.message}", f"Hint: {report.cuda_missing.hint}"], None)


@click.command(cls=Command)
@click.argument("target", metavar="[PATH]", default="example.pth")
@flag("--force", says="Replace a file that is there.")
def example(target: str, *, force: bool) -> None:
    """
    Write a small checkpoint to try the verbs on.

    It is what a training under DistributedDataParallel on a GPU leaves behind: 11 KB, written to PATH, by default
    example.pth. It needs no torch.
    """
    from ckptool.migration.migrate import migrate  # shells ask for completion when they start

    migrate(Path(__file__).with_name("example.pth"), target, form="same", force=force)
    say(advised(f"{target}: written", command=f"ckptool {system.quoted(target)}"))


_SHELLS = ("bash", "zsh", "fish", "powershell")


@click.command(cls=Command)
@click.argument("shell", required=False, type=click.Choice(_SHELLS), metavar="[bash|zsh|fish|powershell]")
def completion(shell: str | None) -> None:
    """
    Print the code with which a shell completes verbs, options and files.

    Without a name, it is for the shell that you use ($SHELL). Put the line for your shell, below, into the file that
    the shell reads when it starts.
    """
    from click.shell_completion import get_completion_class

    from ckptool.cli import cli

    name = shell or os.path.basename(os.environ.get("SHELL", "")).removesuffix(".exe")
    found = get_completion_class(name) if name in _SHELLS else None
    if found is None:
        needs = "for PowerShell, click 8.5 or newer is needed: pip install -U click"
        raise click.UsageError(needs if name in _SHELLS else f"name a shell: {', '.join(_SHELLS)}")
    click.echo(found(cli, {}, "ckptool", "_CKPTOOL_COMPLETE").source())


@click.command(cls=Command)
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--device", default="auto", show_default=True, help="auto, or what 'ckptool devices' lists.")
@flag("-v", "--verbose", says="Name each file as it is written.")
def fixtures(folder: Path, *, device: str, verbose: bool) -> None:
    """
    Train a small net briefly and save it in every way.

    Writes the state_dict, the whole model, a training checkpoint, an average of the weights and two common mistakes,
    each as a zip and in the format from before PyTorch 1.6; on CUDA also in each wrapper.
    """
    from ckptool.torch_ops import needed

    needed(requirement='"ckptool[train]"')
    from ckptool.reference.trainer import choose, write_fixtures
    from ckptool.torch_ops import devices as torch_devices

    choice = choose(device, torch_devices.devices(os.environ.get("CUDA_VISIBLE_DEVICES")))
    click.echo(f"training on {choice.device}: {choice.why}", err=True)

    def tell(name: str) -> None:
        if verbose:
            click.echo(name, err=True)

    try:
        written = write_fixtures(folder, choice.device, tell)
    except RuntimeError as error:  # torch has no kernel for the device, or no backend for two of them to communicate
        if choice.device.type == "cpu":
            raise
        what = f"{choice.device} cannot do all that the nets need: {error}".partition("\n")[0]
        raise UnsupportedFeature(what, kind="device", hint="Use `--device cpu`.") from error
    click.echo(f"wrote {written} fixtures to {folder}")
