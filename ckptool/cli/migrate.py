"""
``ckptool migrate`` and ``ckptool merge``.

And ``ckptool merge``, which writes as it does: adapters into the model that they are for, or the mean of several.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, get_args

import click
from click.core import ParameterSource

from ckptool.arguments import as_utf8
from ckptool.cli.options import (
    AnyPath,
    RayCommand,
    brief_option,
    choices,
    model_arg_option,
    pairs_of,
    ray_option,
    recipe_options,
    remote_options,
)
from ckptool.cli.printing import Failed, Output, Result, output_for
from ckptool.cli.text import ProgressLine, in_options
from ckptool.cli.verbs import ORDER, Command, flag, takes
from ckptool.errors import CkptoolError, Failure, MigrationRefused, OutputExists, WeightsNotFound
from ckptool.messages import counted, show, show_nbytes
from ckptool.migration.casting import TARGETS
from ckptool.migration.changes import Changes, OptimizerNames
from ckptool.migration.migrate import WriteOptions, migrate_by, unmatched
from ckptool.migration.migrate import migrate as migrate_file
from ckptool.migration.report import SCHEMA, MigrationReport, sections_of
from ckptool.migration.selection import Unmatched, nothing_matches
from ckptool.names import renaming
from ckptool.sections import Section
from ckptool.sources.paths import below, file_of, is_remote, shown_path
from ckptool.sources.source import Progress
from ckptool.tensors.dtypes import spelled

if TYPE_CHECKING:
    from ckptool.cli.pool import Outcome
    from ckptool.migration.file_jobs import Writers


_Pair: TypeAlias = tuple[str, str | None]
"""A source, and the path that was given for its result."""

_NAME_OPTIONS = ("strip_prefix", "add_prefix", "rename", "rename_file")
"""Options that change names, applied in the order of the command line."""
_DEVICES = ("cpu", "cuda", "cuda:0", "mps", "xpu", "meta")
"""The tags that are requested most."""

_UNIT: Final = re.compile(r"[kKMGT]?i?[bB]")
_TRIES: Final = 2
"""Tries of one file of a folder, each by another process;"""
_TRIES_ON_RAY: Final = 4
"""more on Ray, because machines that others may take away are lost more often."""


class _DType(click.Choice):  # type: ignore[type-arg]
    """A floating type, by torch's name, or in short."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(spelled(value), param, ctx)


@click.command(cls=RayCommand)
@click.argument("paths", nargs=-1, required=True, metavar="SRC [DST]", type=AnyPath())
@click.option(
    "--form",
    type=click.Choice(["same", "state_dict", "safetensors", "model", "dcp"]),
    help="What to write; by default what DST's suffix says, or else all of SRC.",
)
@takes(
    "--max-shard-size",
    "SIZE",
    "Write a folder of safetensors shards, or of files of DCP, of at most so many bytes: 5GB, 500MiB.",
)
@click.option(
    "--to",
    multiple=True,
    metavar="DEVICE|OLD=NEW",
    shell_complete=choices(lambda: _DEVICES),
    help="Device tag for every tensor: cpu, cuda:0, mps…; or for those of one device: cuda:1=cpu. Repeatable.",
)
@flag("--strip-module", says="Remove what DataParallel and DistributedDataParallel added.")
@flag("--strip-wrappers", says="Remove what training wrappers added, however they are nested.")
@takes("--strip-prefix", "P", "Remove what every name begins with: whole components. Repeatable.", multiple=True)
@takes("--add-prefix", "P", "Put a prefix in front of every name. Repeatable.", multiple=True)
@takes("--rename", "RE=REPL", "Replace a regular expression in names. Repeatable.", multiple=True)
@click.option(
    "--rename-file",
    multiple=True,
    type=click.File("rb"),
    help="File with one RE=REPL on each line; # begins a comment. Repeatable.",
)
@recipe_options
@click.option(
    "--like",
    metavar="OTHER",
    type=AnyPath(),
    help="Find the renames and the recipe that give the weights OTHER's names and shapes.",
)
@takes("--join", "RULE", "Join slices of ranks: GLOB=DIM, GLOB=same, or meta-llama, vllm… Repeatable.", multiple=True)
@click.option("--cut", type=int, metavar="N", help="Write the slices of N ranks, by the rules of --join.")
@takes("--include", "GLOB", "Take only names that match. Repeatable.", multiple=True)
@takes("--exclude", "GLOB", "Leave out names that match. Repeatable.", multiple=True)
@click.option(
    "--drop",
    multiple=True,
    metavar="KEY",
    shell_complete=choices(lambda: ("optimizer", "ema")),
    help="Leave out optimizer, ema, or the entry at a path. Repeatable.",
)
@takes("--key", "PATH", "Which state dict to take.")
@click.option(
    "--weights",
    type=click.Choice(["auto", "raw", "ema", "module"]),
    default="auto",
    show_default=True,
    help="Which weights to take.",
)
@click.option("--dtype", type=_DType(TARGETS), help="Cast the floating-point tensors of the weights.")
@takes("--keep-dtype", "RE", "Keep the type of tensors whose names match. Repeatable.", multiple=True)
@flag("--saturate", says="Replace values too large for --dtype by its largest one.")
@flag(
    "--break-quantized",
    says="Cast quantised weights and scales as they are, or leave out scales: values will be wrong.",
)
@flag("--dequantize", says="Write quantised weights as the plain ones that they stand for, in the type of --dtype.")
@flag("--expand-tied", says="Write tied tensors under each name (safetensors).")
@flag("--drop-unsupported", says="Leave out what the target cannot hold.")
@flag(
    "--keep-calls",
    says="Keep what reaches the system when unpickled; in a state dict, also what torch.load() refuses.",
)
@flag("--allow-empty", says="Allow an --include that matches nothing, and a result without tensors.")
@flag(
    "--allow-unmatched",
    says="Allow globs, patterns and renames that are about no name in any SRC, and devices that it does not have.",
)
@flag("--allow-missing", says="Take the weights even if SRC lacks some of them, or cannot name them.")
@click.option(
    "--optimizer-names",
    type=click.Choice(get_args(OptimizerNames)),
    help="With --form dcp, name optimizer states by parameters: as get_state_dict (nested, or flat), or as torchtitan.",
)
@takes("--set-metadata", "K=V", "Keep a text beside the tensors (safetensors). Repeatable.", multiple=True)
@takes("--drop-metadata", "GLOB", "Leave out keys of metadata that match (safetensors). Repeatable.", multiple=True)
@takes(
    "--config-from",
    "DIR",
    "Take config.json, tokenizer and the like of this folder along, into a folder of shards.",
)
@takes(
    "--model", "MODULE:CLASS", "Build this class, or FILE.py:CLASS, load the weights into it, and save the whole model."
)
@model_arg_option
@click.option(
    "--out-dir",
    type=AnyPath(file_okay=False),
    metavar="DIR",
    help="Write into this folder, under the sources' own names; all paths are then sources.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Sources to work on at once; of one source, processes that write the files of its folder.",
)
@ray_option("Migrate each source, or write each file of one folder,")
@flag("--force", says="Overwrite what exists.")
@flag("--in-place", says="Edit SRC itself: names, devices, metadata. All paths are then sources.")
@flag("--no-reflink", says="Copy tensors even where the file system could share their bytes.")
@flag("--deep", says="With --in-place, compare the checksums of all tensors first.")
@flag("--compact", says="With --in-place, replace SRC by a copy without what is no longer used.")
@flag("--no-verify", says="Do not read the result back, and do not compare SRC's checksums.")
@flag("--dry-run", says="Say what would be done, and write nothing.")
@brief_option
@flag("-q", "--quiet", says="Print only the name of each result.")
@flag("--json", "as_json", says="Print the report as JSON; a list if there are several sources.")
@flag("--jsonl", "as_lines", says="Print a line of JSON for each source, as it comes.")
@remote_options
def migrate(paths: tuple[str, ...], **options: Any) -> None:
    """
    Write a checkpoint for another device, in another form or with other names.

    Nothing in SRC runs. Without --in-place, SRC is only read; it is replaced only if you name it as DST, with --force.
    DST, a file or a folder, appears when it is complete, read back and compared. Without DST, the result is written
    next to SRC, and its name is printed. More than two paths are all sources; 'out/' at their end is a folder to make.

    Names: wrappers are stripped first, then --strip-prefix, --add-prefix, --rename and --rename-file apply in the order
    in which they are given. --include and --exclude go by the names in SRC.

    With --in-place no tensor is read or moved, and readers get the old file, the new one or an error. After a crash,
    'ckptool recover SRC' makes it what it was.

    Exit code 1: refused, because it would lose something; 2: could not be done.
    """
    size, unit = options["max_shard_size"], next(filter(_UNIT.fullmatch, paths), None)
    if size is not None and size.isdigit() and unit is not None and not os.path.lexists(unit):
        raise click.UsageError(f"--max-shard-size {size} {unit} has a blank in it: write --max-shard-size {size}{unit}")
    same = {name: options[name] for name in Changes._fields if name in options and name not in _NAME_OPTIONS}
    same |= {"to": _device_tags(options["to"]), "set_metadata": pairs_of("--set-metadata", options["set_metadata"])}
    changes = Changes(**same, rename=tuple(_rules(options, click.get_current_context().meta[ORDER])))
    work = _in_place(paths) if options["in_place"] else _copies(paths, options, changes)
    if options["ray"] and options["out_dir"] is None and (options["in_place"] or not changes.makes_folder):
        raise click.UsageError("--ray is for --out-dir, or a folder of several files: --max-shard-size, or --form dcp")
    sources = [source for source, _ in work]
    output = output_for(options, sources, is_list=len(work) > 1, is_bare=options["quiet"])
    arguments = {name: options[name] for name in ("force", "dry_run", "in_place", "deep", "compact")}
    arguments |= {"changes": changes, "verify": not options["no_verify"], "reflink": not options["no_reflink"]}
    code = 0
    with _folder(options["out_dir"]):
        refusal = None
        globs = (changes.include, changes.exclude, changes.keep_dtype, changes.drop_metadata)
        matched = (*globs, changes.rename, isinstance(changes.to, dict))
        if len(work) > 1 and any(matched):
            refusal = None if changes.allow_unmatched else _matching_nowhere(work, changes)
            arguments["changes"] = changes._replace(allow_unmatched=True)
        line = ProgressLine(len(work), shown=output.shows_progress)
        outcomes = _outcomes(work, arguments, options, line) if refusal is None else repeat(refusal, len(work))
        for outcome, (source, target) in zip(outcomes, work, strict=True):
            if isinstance(outcome, OutputExists) and target is not None and not options["out_dir"]:
                outcome.hint = f"{outcome.hint} If both are sources, name a folder for the results, `--out-dir`."
            code = max(code, _print(output, outcome, source, quiet=options["quiet"]))
    output.end()
    sys.exit(code)


def _print(output: Output, outcome: Outcome, source: str, *, quiet: bool) -> int:
    """Print a report, or an error, and return its exit code."""
    if isinstance(outcome, CkptoolError):
        result: Result = NotMigrated(shown_path(source), outcome)
    else:
        result = Migrated(outcome, quiet=quiet)
    output.add(result)
    return result.exit_code


def _matching_nowhere(work: Sequence[_Pair], changes: Changes) -> MigrationRefused | None:
    """Return the error for globs and patterns that match no name in any of the sources that can be read."""
    left: list[Unmatched] | None = None
    for source, target in work:
        with suppress(Failure):  # its own migration reports what is wrong with it
            found = unmatched(source, target, changes)
            left = found if left is None else [one for one in left if one in found]
        if left == []:
            return None
    return nothing_matches(left, f"no name in any of the {len(work):,} sources") if left else None


def _in_place(paths: Sequence[str]) -> list[_Pair]:
    """Return the files to edit; refuse paths that cannot be."""
    for path in paths:  # before the first is edited: the last may have been meant as the name of a copy
        if is_remote(path):
            raise click.UsageError(f"{shown_path(path)} is far away: --in-place edits files that are here")
        if not os.path.lexists(file_of(path)):
            what = "is not there: with --in-place, all paths are files to edit"
            raise click.UsageError(f"{show(shown_path(path))} {what}")
    return [(path, None) for path in paths]


def _copies(paths: Sequence[str], options: dict[str, Any], changes: Changes) -> list[_Pair]:
    """Return each source with the path that was given for its result; a folder for all goes into the options."""
    if options["deep"]:
        raise click.UsageError("--deep is for --in-place: what is copied is compared in any case")
    if options["compact"]:
        raise click.UsageError("--compact is for --in-place: what is written anew has nothing unused")
    last = paths[-1]
    is_new_folder = last.endswith((os.sep, os.altsep or os.sep)) and not (is_remote(last) or os.path.lexists(last))
    if is_new_folder and len(paths) > 1 and not (options["out_dir"] or changes.makes_folder):
        paths, options["out_dir"] = paths[:-1], last
    if options["out_dir"] is None:
        if len(paths) == 2 and paths[1] == "-":
            raise click.UsageError(
                "there is no output to a pipe: DST is a file or a folder ('./-', if it is called so)"
            )
        if len(paths) < 3:
            return [(paths[0], paths[1] if len(paths) == 2 else None)]
        for path in paths:  # before the first is written: the last may have been meant as the name of a result
            if not is_remote(path) and not os.path.lexists(file_of(path)):
                raise click.UsageError(
                    f"{show(path)} is not there: more than two paths are sources; or say --out-dir DIR"
                )
        if os.path.isdir(paths[-1]) and not all(map(os.path.isdir, paths)):
            raise click.UsageError(
                f"{show(paths[-1])} is a folder: if it is for the results, say --out-dir {show(paths[-1])}"
            )
        return [(path, None) for path in paths]
    named: dict[str, str] = {}
    for path in paths:
        twin = named.setdefault(os.path.basename(os.path.splitext(path)[0]), path)
        if twin is not path:
            raise click.UsageError(f"{show(twin)} and {show(path)} would have one name in --out-dir")
    folder = below(options["out_dir"], "")
    # A file gets its suffix later, from its form; a folder has its whole name here.
    return [(path, below(folder, name) if changes.makes_folder else folder) for name, path in named.items()]


@contextmanager
def _folder(path: str | None) -> Iterator[None]:
    """Make a folder, if one is named, for a block; remove it afterwards if it is new and empty."""
    own = Path(path).absolute() if path is not None and not is_remote(path) else None
    made = [one for one in (own, *own.parents) if not one.exists()] if own is not None else []
    if own is not None:
        own.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for one in made:
            with suppress(OSError):  # it is not empty
                one.rmdir()


def _device_tags(given: Sequence[str]) -> str | dict[str, str] | None:
    """Return the value of ``--to``: one device for all, or new devices by old ones."""
    pairs = [text.partition("=") for text in given]
    found = {old: new for old, equals, new in pairs if equals}
    if len(found) == len(given):
        return found or None
    if len(given) > 1:
        raise click.BadParameter(
            f"name one device for everything, or OLD=NEW for each: {', '.join(given)}", param_hint="--to"
        )
    return given[0]


def _rules(options: dict[str, Any], order: Sequence[str]) -> Iterator[renaming.Rule]:
    """Yield the rules for names in the order in which they were given."""
    given = {name: iter(options[name]) for name in _NAME_OPTIONS}
    for name in order:
        if name not in given:
            continue
        value = next(given[name])
        if name == "strip_prefix":
            yield renaming.strip_prefix(value)
        elif name == "add_prefix":
            yield renaming.add_prefix(value)
        elif name == "rename":
            yield _substitution(value, "--rename")
        else:
            try:
                lines = [line.decode().partition(" #")[0].strip() for line in as_utf8(value.read()).splitlines()]
            except UnicodeDecodeError as error:
                raise click.BadParameter(f"not a text file: {error}", param_hint="--rename-file") from error
            rules = [_substitution(line, "--rename-file") for line in lines if line and not line.startswith("#")]
            if not rules:
                raise click.BadParameter(f"no RE=REPL in {show(value.name)}", param_hint="--rename-file")
            yield from rules


def _substitution(text: str, option: str) -> renaming.Rule:
    try:
        return renaming.substitution(text)
    except MigrationRefused as error:
        raise click.BadParameter(error.message, param_hint=option) from error


def _outcomes(
    work: Sequence[_Pair], arguments: dict[str, Any], options: dict[str, Any], line: ProgressLine
) -> Iterator[Outcome]:
    """Yield the report for each source, or its error."""
    jobs = options["jobs"]
    if options["ray"]:
        from ckptool.cli.on_ray import OnRay
        from ckptool.cli.pool import FileWriters, migrations

        is_asked = click.get_current_context().get_parameter_source("jobs") is ParameterSource.COMMANDLINE
        with OnRay(options["ray"], jobs if is_asked else None) as ray:
            if options["out_dir"] is None:
                yield from _one_by_one(work, arguments, line, FileWriters(ray, _TRIES_ON_RAY))
            else:
                yield from migrations(ray, work, arguments)
    elif jobs > 1 and len(work) > 1:
        yield from _in_threads(jobs, work, arguments)
    elif jobs > 1 and arguments["changes"].makes_folder and not options["in_place"]:
        from ckptool.cli.pool import FileWriters, Processes  # most are written by this process

        with Processes(jobs) as pool:
            yield from _one_by_one(work, arguments, line, FileWriters(pool, _TRIES))
    else:
        yield from _one_by_one(work, arguments, line)


def _in_threads(jobs: int, work: Sequence[_Pair], arguments: dict[str, Any]) -> Iterator[Outcome]:
    from concurrent.futures import ThreadPoolExecutor
    from threading import Event

    stopped = Event()

    def stop(_done: int, _total: int) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt

    with ThreadPoolExecutor(jobs) as threads:
        try:
            yield from threads.map(lambda pair: _outcome(pair, arguments, stop, stop), work)
        except BaseException:
            stopped.set()  # only the main thread is interrupted
            raise


def _one_by_one(
    work: Sequence[_Pair], arguments: dict[str, Any], line: ProgressLine, writers: Writers | None = None
) -> Iterator[Outcome]:
    for pair in work:
        line.next(pair[0])
        outcome = _outcome(pair, arguments, line, line.read_back, writers)
        line.clear()
        yield outcome


def _outcome(
    pair: _Pair, arguments: dict[str, Any], progress: Progress, read_back: Progress, writers: Writers | None = None
) -> Outcome:
    source, target = pair
    told: dict[str, Any] = {"progress": progress, "read_back": read_back}
    try:
        if writers is None:
            return migrate_file(source, target, **arguments, **told)
        given = {name: arguments[name] for name in ("force", "verify", "dry_run")}
        return migrate_by(writers, source, target, arguments["changes"], WriteOptions(**given, **told))
    except CkptoolError as error:
        return error


class Migrated(Result):
    """What was written, or would be."""

    def __init__(self, report: MigrationReport, *, quiet: bool) -> None:
        super().__init__(report.source)
        self._report = report
        self._quiet = quiet
        self.nbytes = report.written_nbytes
        self.otherwise = "written" if report.written else "planned"

    @property
    def note(self) -> str | None:
        return f"Warning: {'; '.join(self._report.assumed)}" if self._report.assumed else None

    def sections(self) -> Iterator[Section]:
        yield show(self._report.target)
        if not self._quiet:
            yield from in_options(sections_of(self._report))

    def cells(self) -> Sequence[str]:
        report = self._report
        left = f"; leaves out {counted(len(report.dropped), 'entry')}" if report.dropped else ""
        return [f"{report.target}: {report.after.format}, {show_nbytes(report.nbytes)}{left}"]

    def object(self) -> dict[str, object]:
        return self._report.as_dict()


class NotMigrated(Failed):
    """A source of which nothing was written. It is refused if that would lose something, or else has failed."""

    def __init__(self, source: str, error: CkptoolError) -> None:
        super().__init__(source, error, schema=SCHEMA, source=source)
        self.exit_code = 1 if isinstance(error, MigrationRefused | WeightsNotFound) else 2

    @property
    def counted_as(self) -> str:
        return "refused" if self.exit_code == 1 else "failed"

    def cells(self) -> Sequence[str]:
        return [self.error.message] if self.error is not None else []


_OF_MIGRATE: Final = (
    *("form", "max_shard_size", "config_from", "key", "weights", "include", "exclude", "dtype", "dequantize"),
    *("keep_dtype", "saturate", "expand_tied", "drop_unsupported", "keep_calls", "allow_empty", "allow_missing"),
    *("force", "dry_run", "quiet", "as_json"),
)
"""Options that are those of ``migrate``."""


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True, metavar="BASE [FILE...]", type=AnyPath())
@takes("--lora", "ADAPTER[=X]", "Add this LoRA adapter to BASE, X times as strong. Repeatable.", multiple=True)
@click.option("--scale", type=float, default=1.0, show_default=True, help="Multiply what all adapters add.")
@flag("--average", says="Write the mean of all files, in the types of the first.")
@takes("--shares", "1,2,1", "With --average, how much each file counts.")
@click.option("--ema", type=float, help="With --average, the share that a moving average keeps at each file.")
@flag("--allow-unmatched", says="Leave out what of an adapter fits no weight, and say so; allow globs without a match.")
@click.option("-o", "--output", "target", required=True, metavar="DST", type=AnyPath(), help="What to write.")
def merge(files: tuple[str, ...], **options: Any) -> None:
    """
    Put LoRA adapters into a checkpoint, or write the mean of several.

    Nothing in the files runs. DST appears when it is complete, read back and compared, in any form that 'migrate'
    writes. Every part of an adapter must fit a weight, by name and shape. Needs torch.

    Exit code 1: refused, because something does not fit; 2: could not be done.
    """
    from ckptool.merging.merge import merge as merge_files

    if options["average"] == bool(options["lora"]):
        raise click.UsageError("give --lora ADAPTER for what is put into BASE, or --average for the mean of all files")
    if options["average"] == (len(files) < 2):
        raise click.UsageError("--average takes two files or more; --lora one, and names each adapter")
    strong: dict[str | os.PathLike[str], float] = dict(map(_strong, options["lora"]))
    if len(strong) < len(options["lora"]):
        raise click.UsageError("one adapter is given twice: add up its numbers")
    output = output_for(options, files[:1], is_list=False, is_bare=options["quiet"])
    line = ProgressLine(1, shown=output.shows_progress)
    line.next(files[0])
    try:
        shares = None if options["shares"] is None else [float(one) for one in options["shares"].split(",")]
    except ValueError as error:
        fact = f"not numbers with commas between them: {options['shares']}"
        raise click.BadParameter(fact, param_hint="--shares") from error
    outcome: Outcome
    try:
        outcome = merge_files(
            files[0],
            options["target"],
            lora=strong or None,
            scale=options["scale"],
            average=files[1:] or None,
            shares=shares,
            progress=line,
            read_back=line.read_back,
            **{name: options[name] for name in ("ema", "force", "dry_run", *Changes._fields) if name in options},
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except CkptoolError as error:
        outcome = error
    line.clear()
    code = _print(output, outcome, files[0], quiet=options["quiet"])
    output.end()
    sys.exit(code)


merge.params.extend(one for one in migrate.params if one.name in _OF_MIGRATE)


def _strong(text: str) -> tuple[str, float]:
    """Return the path of an adapter, and its factor."""
    path, equals, number = text.rpartition("=")
    if not equals or os.path.lexists(text):
        return text, 1.0
    try:
        return path, float(number)
    except ValueError as error:
        if os.path.lexists(path):
            raise click.BadParameter(f"not a number: {number!r}, in {text}", param_hint="--lora") from error
        return text, 1.0
