"""Pages for tests, and what is in them."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any

from click.testing import Result

from tests.program import invoke

HOSTILE = (
    "<script>document.title='ran'</script>",
    "</script><img src=x onerror=document.title='ran'>.weight",
    "a\u202egnp.c",
    "n\0ul.x",
    "L" * 60_000,
    "\U0001f600.\xe9.x",
    "\U0001f600.\xe9.y",
    "",
    ".",
    "a..b",
    ".".join("d" * 3000),
    "{{content}}",
    "-->]]>&lt;",
    "__proto__.constructor",
    "__proto__.toString",
)
"""Names that a page, a script or a screen could take for something else."""


def report(*arguments: object) -> Result:
    return invoke(["report", *map(str, arguments)])


def content_of(page: bytes) -> Any:
    """Return what a page shows."""
    found = re.search(rb'<script type="application/json" id="content">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def rows_of(page: bytes) -> Any:
    """Return the rows of its tensors."""
    return json.loads(zlib.decompress(base64.b64decode(content_of(page)["tensors"])))


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> Path:
    """Write a safetensors file of zeros, of which the disk has nothing."""
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = 4 if dtype == "F32" else 2
        for size in shape:
            nbytes *= size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path


def mixture(layers: int = 58, experts: int = 115) -> dict[str, tuple[str, list[int]]]:
    """Return the tensors of a mixture of experts: 20,419, unless fewer are asked for."""
    tensors: dict[str, tuple[str, list[int]]] = {"model.embed_tokens.weight": ("BF16", [256, 8])}
    for layer in range(layers):
        head = f"model.layers.{layer}"
        tensors |= {f"{head}.self_attn.{one}_proj.weight": ("BF16", [8, 8]) for one in "qkvo"}
        tensors[f"{head}.block_sparse_moe.gate.weight"] = ("F32", [experts, 8])
        for expert in range(experts):
            for one in ("w1", "w2", "w3"):
                tensors[f"{head}.block_sparse_moe.experts.{expert}.{one}.weight"] = ("BF16", [24, 8])
        tensors[f"{head}.input_layernorm.weight"] = ("F32", [8])
        tensors[f"{head}.post_attention_layernorm.weight"] = ("F32", [8])
    return tensors | {"model.norm.weight": ("F32", [8]), "lm_head.weight": ("BF16", [256, 8])}
