"""
Weights that are arrays of numpy: found where a tree has no weights that are tensors.

Arrays beside the weights of torch are data: curves, random states, means. Where there are no such weights, arrays are
what people call the weights, under the names and in the groups that tensors would have.
"""

from __future__ import annotations

from ckptool.cancellation import check_cancelled
from ckptool.checkpoints.contents import Contents, ModelGraph, collect
from ckptool.checkpoints.roles import role_of
from ckptool.limits import Limits
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert
from ckptool.pickles.numpy_values import is_array
from ckptool.tensors.rebuild import Rebuilder


def collect_weights(root: Inert, rebuilder: Rebuilder, limits: Limits, graph: ModelGraph | None = None) -> Contents:
    """
    Return what is in the tree below ``root``, arrays among the tensors if nothing else in it is weights.

    Raises what ``collect`` raises.
    """
    contents = collect(root, rebuilder, limits, graph)
    if contents.walks or _has_weights(contents) or not _has_arrays(contents, limits):
        return contents
    rebuilder.take_arrays()
    with_arrays = collect(root, rebuilder, limits, graph)
    if not contents.tensors or _has_weights(with_arrays):
        return with_arrays
    rebuilder.take_arrays(take=False)
    return contents


def _has_weights(contents: Contents) -> bool:
    return any(group.names and role_of(group, contents) in ("model", "ema") for group in contents.groups)


def _has_arrays(contents: Contents, limits: Limits) -> bool:
    """Say whether there is an array anywhere in what holds no tensor."""
    todo = [node for _, node in contents.extras]
    seen: set[int] = set()
    while todo:
        check_cancelled(limits.cancellation)
        node = todo.pop()
        if not nodes.is_container(node) or id(node) in seen:
            continue
        seen.add(id(node))
        if is_array(node):
            return True
        todo.extend(nodes.held(node))
    return False
