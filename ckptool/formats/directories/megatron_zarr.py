"""
Megatron-core's checkpoints from before ``torch_dist``: a zarr array for each tensor, each a folder of blocks.

    metadata.json                        {"sharded_backend": "zarr", …}
    common.pt                            what is not sharded, without weights
    model.decoder.layers.weight/.zarray  shape, type, compression of the blocks beside it

They are recognised and refused: ``common.pt`` alone would pass for a checkpoint without weights.
"""

from __future__ import annotations

from typing import Final, NoReturn

from ckptool.errors import UnsupportedFeature
from ckptool.formats.probe import Probe
from ckptool.formats.settings import json_object
from ckptool.messages import counted
from ckptool.sources.folder import FolderSource

NAME: Final = "megatron_zarr"
_METADATA: Final = "metadata.json"
_COMMON: Final = "common.pt"
_BACKEND: Final = "zarr"
_ARRAY: Final = ".zarray"
_MOST_LOOKED_AT: Final = 16


def sniff(folder: FolderSource) -> bool:
    """Say whether the text in the folder says so, or folders in it are arrays of zarr."""
    if _METADATA in folder.files and json_object(folder, _METADATA).get("sharded_backend") == _BACKEND:
        return True
    return _COMMON in folder.files and any(folder.has(f"{name}/{_ARRAY}") for name in folder.folders[:_MOST_LOOKED_AT])


def read(folder: FolderSource, probe: Probe) -> NoReturn:  # noqa: ARG001 - a layout
    """
    Refuse the folder.

    Raises:
        UnsupportedFeature: Arrays of zarr are not read.
    """
    count = sum(folder.has(f"{name}/{_ARRAY}") for name in folder.folders)
    fact = f"a checkpoint of Megatron-core in the format zarr, of {counted(count, 'array')}, which is not read"
    raise UnsupportedFeature(fact, kind="zarr", hint="Load it in Megatron-LM, and save it in its format torch_dist.")
