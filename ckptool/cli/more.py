"""The verbs that the help lists under "More": each needs only a few lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

import ckptool.system as system
from ckptool.cli.printing import print_json, with_hints
from ckptool.cli.text import advised, say, say_sections
from ckptool.cli.verbs import Command, flag
from ckptool.errors import MissingPackage, UnsupportedFeature
from ckptool.sections import Section, Table

if TYPE_CHECKING:
    from ckptool.torch_ops.devices import DeviceReport


_DEVICES_SCHEMA = "ckptool.devices/1"
_HEADERS = ("device", "name", "free", "total", "compute capability")


@click.command(cls=Command)
@flag("--json", "as_json", says="Print one JSON object.")
def devices(*, as_json: bool) -> None:
    """
    Show what torch sees on this machine.

    Lists every device with its name, free and total memory and compute capability. Says why if CUDA is missing. Needs
    torch.
    """
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
    else:
        say_sections(_sections(report), None)


def _sections(report: DeviceReport) -> Iterator[Section]:
    built = f", built for CUDA {report.cuda_build}" if report.cuda_build else ""
    yield f"torch {report.torch_version}{built}"
    yield ""
    rows = []
    for one in report.devices:
        sizes = ("-" if size is None else f"{size / 2**30:,.1f} GiB" for size in (one.free_nbytes, one.total_nbytes))
        rows.append((one.tag, one.name, *sizes, one.compute_capability or "-"))
    yield Table(_HEADERS, rows, [False] * len(_HEADERS))
    if report.cuda_missing:
        yield from ("", f"No CUDA: {report.cuda_missing.message}", f"Hint: {report.cuda_missing.hint}")


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
    from ckptool.reference.command import write_fixtures
    from ckptool.reference.trainer import choose
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
