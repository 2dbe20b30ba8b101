"""``ckptool migrate``: the same checkpoint in another form, for another device, under other names."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import click

from ckptool import transforms
from ckptool.casting import TARGETS
from ckptool.errors import CkptoolError, MigrationRefused
from ckptool.migration import MigrationReport
from ckptool.migration import migrate as migrate_file
from ckptool.render import error_text
from ckptool.tables import show, show_nbytes

SCHEMA = "ckptool.migrate/1"

_LISTED = 8
_SECONDS_UNTIL_PROGRESS = 0.5
_LABEL = 13


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="SRC [DST]")
@click.option(
    "--form",
    type=click.Choice(["same", "state_dict", "safetensors", "model"]),
    help="What to write; by default, DST's suffix decides.",
)
@click.option("--to", metavar="DEVICE", help="Device tag for every tensor: cpu, cuda:0, mps…")
@click.option("--strip-module", is_flag=True, help="Remove what DataParallel and DistributedDataParallel added.")
@click.option("--strip-wrappers", is_flag=True, help="Remove what any training wrapper added, in any nest.")
@click.option("--strip-prefix", multiple=True, metavar="P", help="Remove a prefix of whole components. Repeatable.")
@click.option("--add-prefix", metavar="P", help="Put a prefix in front of every name.")
@click.option(
    "--rename",
    "renames",
    multiple=True,
    metavar="RE=REPL",
    help="Replace a regular expression in names. Repeatable, in order.",
)
@click.option("--rename-file", type=click.File(encoding="utf-8"), help="One RE=REPL a line; # begins a comment.")
@click.option("--include", multiple=True, metavar="GLOB", help="Take only names that match. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave out names that match. Repeatable.")
@click.option(
    "--drop", multiple=True, metavar="KEY", help="Leave out optimizer, ema, or the entry at a path. Repeatable."
)
@click.option("--key", metavar="PATH", help="Which state dict to take.")
@click.option(
    "--weights",
    type=click.Choice(["auto", "raw", "ema"]),
    default="auto",
    show_default=True,
    help="Which weights to take.",
)
@click.option("--dtype", type=click.Choice(TARGETS), help="Cast floating tensors.")
@click.option("--keep-dtype", multiple=True, metavar="RE", help="Leave the type of names that match. Repeatable.")
@click.option("--saturate", is_flag=True, help="Let values too large for --dtype become its largest.")
@click.option("--expand-tied", is_flag=True, help="Write tied tensors under each name (safetensors).")
@click.option("--drop-unsupported", is_flag=True, help="Leave out what the target cannot hold.")
@click.option(
    "--model", metavar="PACKAGE.MODULE:CLASS", help="Build this class, load the weights, save the whole model."
)
@click.option(
    "--model-arg", "model_args", multiple=True, metavar="K=V", help="Argument for --model: a Python literal, or text."
)
@click.option(
    "--out-dir", type=click.Path(file_okay=False), metavar="DIR", help="Where to write; all paths are then sources."
)
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Sources to work on at once.")
@click.option("--force", is_flag=True, help="Overwrite what exists.")
@click.option("--no-verify", is_flag=True, help="Do not read the result back before it gets its name.")
@click.option("--dry-run", is_flag=True, help="Say what would be done.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON; a list if there are several sources.")
def migrate(paths: tuple[str, ...], **options: Any) -> None:
    """
    Write a checkpoint again: for another device, in another form, under other names.

    Nothing in SRC runs and SRC is never changed. DST appears only whole, after it was read back and compared. Without
    DST the result stands beside SRC and its name is printed. Exit code 1: refused, for it would lose something;
    2: could not be done.
    """
    sources, target = _sources(paths, options["out_dir"])
    as_json, jobs = options.pop("as_json"), options.pop("jobs")
    try:
        arguments = _arguments(options)
    except MigrationRefused as error:
        raise click.BadParameter(error.message) from error
    code = 0
    reports: list[dict[str, object]] = []
    for source, outcome in _run(sources, target, options["out_dir"], arguments, jobs):
        if isinstance(outcome, CkptoolError):
            code = max(code, 1 if isinstance(outcome, MigrationRefused) else 2)
            reports.append(_error_object(source, outcome))
            if not as_json:
                click.echo(error_text(outcome), err=True)
        else:
            reports.append(_object(outcome))
            if not as_json:
                click.echo("\n".join(_lines(outcome)))
    if as_json:
        import json

        click.echo(json.dumps(reports[0] if len(sources) == 1 else reports, ensure_ascii=True))
    sys.exit(code)


def _sources(paths: tuple[str, ...], out_dir: str | None) -> tuple[list[str], str | None]:
    if out_dir is not None:
        os.makedirs(out_dir, exist_ok=True)  # noqa: PTH103
        return list(paths), None
    if len(paths) > 2:
        raise click.UsageError("several sources need --out-dir")
    return [paths[0]], paths[1] if len(paths) == 2 else None


def _arguments(options: dict[str, Any]) -> dict[str, Any]:
    rules = [transforms.strip_prefix(prefix) for prefix in options["strip_prefix"]]
    lines = list(options["renames"])
    if options["rename_file"] is not None:
        lines += [line.strip() for line in options["rename_file"] if line.strip() and not line.startswith("#")]
    for line in lines:
        pattern, separator, replacement = line.partition("=")
        if not separator:
            raise click.BadParameter(f"not of the form RE=REPL: {line!r}", param_hint="--rename")
        rules.append(transforms.substitute(pattern, replacement))
    if options["add_prefix"]:
        rules.append(transforms.add_prefix(options["add_prefix"]))
    same = (
        "form to key weights strip_module strip_wrappers include exclude drop dtype keep_dtype saturate expand_tied "
        "drop_unsupported model force dry_run"
    )
    return {
        **{name: options[name] for name in same.split()},
        "rules": rules,
        "verify": not options["no_verify"],
        "model_arguments": dict(model_argument(text) for text in options["model_args"]),
    }


def model_argument(text: str) -> tuple[str, object]:
    """Return the name and the value of ``K=V``: a Python literal, or else text."""
    import ast

    name, separator, value = text.partition("=")
    if not separator:
        raise click.BadParameter(f"not of the form K=V: {text!r}", param_hint="--model-arg")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _run(
    sources: Sequence[str], target: str | None, out_dir: str | None, arguments: dict[str, Any], jobs: int
) -> Iterator[tuple[str, MigrationReport | CkptoolError]]:
    def one(source: str) -> MigrationReport | CkptoolError:
        progress = _Progress(source) if sys.stderr.isatty() and jobs == 1 else None
        try:
            place = target if out_dir is None else _in_folder(source, out_dir, arguments["form"])
            return migrate_file(source, place, progress=progress, **arguments)
        except CkptoolError as error:
            return error
        finally:
            if progress is not None:
                progress.clear()

    if jobs == 1 or len(sources) == 1:
        yield from ((source, one(source)) for source in sources)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(sources, pool.map(one, sources), strict=True)


def _in_folder(source: str, out_dir: str, form: str | None) -> str:
    name = os.path.basename(source.partition("::")[0])  # noqa: PTH119
    stem, suffix = os.path.splitext(name)  # noqa: PTH122
    return os.path.join(out_dir, f"{stem}.safetensors" if form == "safetensors" else f"{stem}{suffix or '.pth'}")  # noqa: PTH118


class _Progress:
    """A line on stderr that counts bytes, once it is clear that this takes a while."""

    def __init__(self, source: str) -> None:
        self._name = show(os.path.basename(source))  # noqa: PTH119
        self._started = time.monotonic()
        self._shown = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._started < _SECONDS_UNTIL_PROGRESS or now - self._shown < 0.1:
            return
        self._shown = now
        share = min(1.0, done / total) if total else 1.0
        click.echo(f"\r{self._name}  {share:4.0%} of {show_nbytes(total)} ", nl=False, err=True)

    def clear(self) -> None:
        if self._shown:
            click.echo("\r\x1b[2K", nl=False, err=True)


def _lines(report: MigrationReport) -> Iterator[str]:
    yield show(report.target)
    did = "written and verified" if report.verified else "written" if report.written else "not written: a dry run"
    yield _line("result", f"{did}, {show_nbytes(report.nbytes)}, {report.tensors:,} tensors")
    yield _line("source", f"{show(report.source)} ({report.source_format})")
    taken = "everything" if report.weights_key is None else "the weights"
    where = f" under {show(report.weights_key)}" if report.weights_key else ""
    yield _line("form", f"{report.form}: {taken}{where}")
    for tag, count in report.retagged.items():
        yield _line("device", f"{show(tag)} -> {report.location}: {count:,}")
    yield from _listed("renamed", [f"{show(old)} -> {show(new)}" for old, new in report.renamed])
    yield from _listed("cast", [_cast_line(cast) for cast in report.casts])
    yield from _listed("tied", [f"{show(name)} is {show(kept)}" for name, kept in report.tied.items()])
    yield from _listed("left out", _grouped(report.dropped))
    if report.loses_training:
        yield _line("note", "training cannot be resumed from it: the optimizer's state is left out")


def _grouped(names: Sequence[str]) -> list[str]:
    """Return names for people to read: those under one head together, where there are many."""
    if len(names) <= _LISTED:
        return [show(name) for name in names]
    heads: dict[str, int] = {}
    for name in names:
        head = name.partition(".")[0]
        heads[head] = heads.get(head, 0) + 1
    return [show(head) if count == 1 else f"{show(head)}: {count:,} entries" for head, count in heads.items()]


def _cast_line(cast: Any) -> str:
    saturated = f", {cast.overflowed:,} values cut to its largest" if cast.overflowed else ""
    return f"{show(cast.name)}: {cast.source} -> {cast.target}, off by at most {cast.max_error:.3g}{saturated}"


def _listed(label: str, items: list[str]) -> Iterator[str]:
    for index, item in enumerate(items[:_LISTED]):
        yield _line(label if index == 0 else "", item)
    if len(items) > _LISTED:
        yield _line("", f"and {len(items) - _LISTED:,} more")


def _line(label: str, text: str) -> str:
    return f"  {label:<{_LABEL}}{text}"


def _object(report: MigrationReport) -> dict[str, object]:
    found = report._asdict()
    found["renamed"] = [list(pair) for pair in report.renamed]
    found["casts"] = [cast._asdict() for cast in report.casts]
    return {"schema": SCHEMA, **found}


def _error_object(source: str, error: CkptoolError) -> dict[str, object]:
    facts = {"kind": error.kind, "message": error.message, "hint": error.hint, "path": error.path}
    return {"schema": SCHEMA, "source": source, "error": facts}
