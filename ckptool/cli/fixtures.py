"""``ckptool fixtures``: checkpoints of every kind, written on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import click

from ckptool.cli.verbs import Command, flag
from ckptool.errors import UnsupportedFeature


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
    from ckptool.torch_ops.packages import needed

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
    except RuntimeError as error:  # of torch: it has no kernel for the device, or nothing by which two of it talk
        if choice.device.type == "cpu":
            raise
        what = f"{choice.device} cannot do all that the nets need: {error}".partition("\n")[0]
        raise UnsupportedFeature(what, kind="device", hint="Use `--device cpu`.") from error
    click.echo(f"wrote {written} fixtures to {folder}")
