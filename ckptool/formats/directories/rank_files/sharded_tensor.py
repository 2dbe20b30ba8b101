"""
``ShardedTensor`` of FSDP1: its state is the shards of this rank, the boxes of all, and the process group.

    (local shards, ShardedTensorMetadata, {"global_rank": …, "global_world_size": …}, sharding spec, …)

See torch/distributed/_shard/sharded_tensor/api.py, ``__getstate__``.
"""

from __future__ import annotations

from ckptool.formats.directories.rank_files.part import Part, malformed
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert, Pairs
from ckptool.tensors.rebuild import Rebuilder
from ckptool.tensors.rebuild_arguments import as_dtype, as_sizes
from ckptool.tensors.tensor import TensorInfo, is_size
from ckptool.tensors.tiling import Box


def part(state: Inert, rebuilder: Rebuilder) -> Part:
    """
    Return what the state of a sharded tensor says.

    Raises:
        MalformedFile: It contradicts itself.
    """
    if not isinstance(state, tuple) or len(state) < 3 or not isinstance(state[0], list):
        raise malformed("without its shards")
    shards, metadata, group = state[:3]
    fields = nodes.attribute_pairs(metadata)
    properties = nodes.attribute_pairs(nodes.lookup(fields, "tensor_properties"))
    dtype = nodes.lookup(properties, "dtype")
    if dtype is None:  # since its state is a tuple
        said = getattr(nodes.lookup(fields, "tensor_properties"), "state", None)
        dtype = said[0] if isinstance(said, tuple) and said else None
    listed = nodes.lookup(fields, "shards_metadata")
    if not isinstance(listed, list):
        raise malformed("that does not list its shards")
    boxes = tuple(_box(nodes.attribute_pairs(one)) for one in listed)
    local = []
    for shard in shards:
        own = nodes.attribute_pairs(shard)
        info = rebuilder.tensor(nodes.lookup(own, "tensor"))
        local.append((_box(nodes.attribute_pairs(nodes.lookup(own, "metadata"))), _checked(info)))
    ranks = nodes.attribute_pairs(group)
    rank, world = (nodes.lookup(ranks, key) for key in ("global_rank", "global_world_size"))
    return Part(
        as_sizes(nodes.lookup(fields, "size")),
        as_dtype(dtype),
        tuple(local),
        boxes,
        rank if is_size(rank) else None,
        world if is_size(world) else None,
    )


def _box(pairs: Pairs) -> Box:
    return as_sizes(nodes.lookup(pairs, "shard_offsets")), as_sizes(nodes.lookup(pairs, "shard_sizes"))


def _checked(info: TensorInfo | None) -> TensorInfo:
    if info is None:
        raise malformed("with a shard that is no tensor")
    return info
