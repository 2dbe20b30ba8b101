"""``python -m ckptool.reference``."""

from __future__ import annotations

import sys

import click

from ckptool.errors import MissingPackage
from ckptool.torch_ops import needed

if __name__ == "__main__":
    try:
        needed(requirement='"ckptool[train]"')
    except MissingPackage as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    from ckptool.reference.trainer import main

    main(prog_name="python -m ckptool.reference")
