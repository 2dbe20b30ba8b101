"""
An index of shards: JSON that says which file beside it holds which tensor. Together they are one checkpoint.

    {"metadata": {"total_size": 24}, "weight_map": {"name": "model-00001-of-00002.safetensors", …}}

Names are files beside the index or below its folder: see ``beside`` for those that are opened. The format of the
checkpoint is that of its shards. Written by the ``save_pretrained`` of transformers and diffusers; see
https://github.com/huggingface/huggingface_hub, serialization/_base.py.
"""

from __future__ import annotations

import re

from ckptool.checkpoints.checkpoint import Checkpoint
from ckptool.errors import MalformedFile
from ckptool.formats.probe import Probe
from ckptool.sources.files import FileSource

NAME = "sharded"

_HEAD_NBYTES = 16 << 20


def sniff(probe: Probe) -> bool:
    """Say whether this is an object with a ``weight_map``, in a file, so that there can be others beside it."""
    source = probe.source
    if not isinstance(source, FileSource) or not probe.head.lstrip().startswith(b"{"):
        return False
    data = source.read(0, min(source.nbytes, _HEAD_NBYTES))
    return re.search(rb'"weight_map"\s{0,100}:\s{0,100}\{', data) is not None


def read(probe: Probe) -> Checkpoint:
    """Read an index, and the index of each shard; no tensor is read."""
    assert isinstance(probe.source, FileSource)  # noqa: S101 - sniff saw it
    if probe.depth:  # inside another source there are no files: it is beside one
        raise MalformedFile("an index of shards itself", kind="nested-index")
    from ckptool.formats.shards import read_shards  # for the few files that have any

    return read_shards(probe.source, probe)
