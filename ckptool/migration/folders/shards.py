"""
Weights → a folder of safetensors files and an index, as huggingface_hub's ``save_torch_state_dict`` writes it.

Shards are filled in the order of the names. A tensor that is larger than a shard may be has one of its own, before the
one that is being filled. Tied names are left out, and are in the index with the name that is kept; what fits into one
file is that file alone. The order of names and the modules' facts, for which there are no keys, are in the first shard.

https://github.com/huggingface/huggingface_hub; src/huggingface_hub/serialization/_base.py, _torch.py
"""

from __future__ import annotations

import json
import re
from typing import Final

from ckptool.cancellation import Cancellation
from ckptool.checkpoints.weights import Weights
from ckptool.errors import MigrationRefused
from ckptool.formats.safetensors import encode
from ckptool.migration import safetensors_plan
from ckptool.migration.planned import BytesFile, FolderPlan, split

_SIZE: Final = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(?:([KMGT])(?:(I?)B)?|B?)\s*", re.IGNORECASE)
_STEPS: Final = "KMGT"
_INDEX: Final = "model.safetensors.index.json"


def size_in_bytes(size: int | str) -> int:
    """
    Return how many bytes a size is: ``"5GB"`` counts in thousands, ``"5GiB"`` in steps of 1024.

    Raises:
        MigrationRefused: It is not a size, or not one byte.
    """
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    nbytes = size if isinstance(size, int) else 0
    if match:
        number, step, binary = match.groups()
        factor = (1024 if binary else 1000) ** (_STEPS.index(step.upper()) + 1 if step else 0)
        nbytes = int(float(number) * factor) if "." in number else int(number) * factor
    if nbytes < 1:
        raise MigrationRefused(
            f"not a size of shards: {size!r}", kind="not-a-size", hint="Sizes are written like '5GB' or '500MiB'."
        )
    return nbytes


def plan(
    weights: Weights,
    most_nbytes: int,
    *,
    expand_tied: bool = False,
    drop_unsupported: bool = False,
    cancellation: Cancellation | None = None,
) -> FolderPlan:
    """
    Return how the weights become shards.

    Raises:
        MigrationRefused: An entry is one that the format cannot hold, or there would be too many shards to be read.
    """
    chosen = safetensors_plan.select(
        weights, expand_tied=expand_tied, drop_unsupported=drop_unsupported, cancellation=cancellation
    )
    kept = chosen.kept
    parts = split(((name, tensor.info.nbytes) for name, tensor in kept.items()), most_nbytes)
    if len(parts) < 2:
        file = safetensors_plan.plan(
            weights, expand_tied=expand_tied, drop_unsupported=drop_unsupported, cancellation=cancellation
        )
        return FolderPlan(
            files=[("model.safetensors", file)],
            expected=file.expected,
            tied=file.tied,
            renamed=file.renamed,
            dropped=file.dropped,
        )
    recorded = chosen.recorded(weights, (name for part in parts for name in part))
    first = encode(recorded._replace(ties={}))
    metadata = [first] + [{"format": first["format"]}] * (len(parts) - 1)
    names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    shards = [
        (file, safetensors_plan.pack({name: kept[name] for name in part}, text, cancellation))
        for file, part, text in zip(names, parts, metadata, strict=True)
    ]
    weight_map = {name: file for file, part in zip(names, parts, strict=True) for name in part}
    total = sum(tensor.info.nbytes for tensor in kept.values())
    index = json.dumps({"metadata": {"total_size": total, **chosen.tied}, "weight_map": weight_map}, indent=2)
    return FolderPlan(
        files=[*shards, (_INDEX, BytesFile(index.encode()))],
        expected=[one for _, shard in shards for one in shard.expected],
        tied=chosen.tied,
        renamed=weights.renamed,
        dropped=chosen.dropped,
    )
