"""
Weights that are arrays of numpy: found where a tree has no weights that are tensors.

Arrays beside the weights of torch are data: curves, random states, means. Where there are no such weights, arrays are
what people call the weights, under the names and in the groups that tensors would have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ckptool.cancellation import check_cancelled
from ckptool.checkpoints.contents import Contents, Group, ModelGraph, collect
from ckptool.checkpoints.roles import role_of
from ckptool.limits import Limits
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Inert
from ckptool.tensors.rebuild import Rebuilder


def collect_weights(
    root: Inert,
    rebuilder: Rebuilder,
    limits: Limits,
    graph: ModelGraph | None = None,
    beside: Collection[str | int] | None = None,
) -> Contents:
    """
    Return what is in the tree below ``root``, arrays among the tensors if nothing else in it is weights.

    ``beside`` are the keys at the root that came from files of their own, where a folder is read. Raises what
    ``collect`` raises.
    """
    contents = _with_arrays(root, rebuilder, limits, graph)
    if beside is not None or len(contents.groups) > 1 or len(contents.extras) > 1:  # else it is a state dict
        from ckptool.checkpoints.flat_states import tell_apart

        tell_apart(contents, beside)
    return contents


def _with_arrays(root: Inert, rebuilder: Rebuilder, limits: Limits, graph: ModelGraph | None) -> Contents:
    contents = collect(root, rebuilder, limits, graph)
    if contents.walks or any(_weights(contents)) or not _has_arrays(contents, limits):
        return contents
    rebuilder.take_arrays()
    with_arrays = collect(root, rebuilder, limits, graph)
    if not contents.tensors or any(_has_arrays_alone(group, with_arrays) for group in _weights(with_arrays)):
        return with_arrays
    rebuilder.take_arrays(take=False)
    return contents


def _weights(contents: Contents) -> Iterator[Group]:
    """Yield the groups that are weights, as far as their place and their names tell."""
    return (group for group in contents.groups if group.names and role_of(group, contents) in ("model", "ema"))


def _has_arrays_alone(group: Group, contents: Contents) -> bool:
    """Say whether a mapping has no tensor of torch at any depth, as one with an optimizer beside curves has."""
    head = f"{group.key}." if group.key else ""
    return all(info.is_array for name, info in contents.tensors.items() if name.startswith(head))


def _has_arrays(contents: Contents, limits: Limits) -> bool:
    """Say whether there is an array anywhere in what holds no tensor."""
    todo = [node for _, node in contents.extras]
    if not todo:
        return False
    from ckptool.pickles.numpy_values import is_array  # many files hold nothing but tensors

    seen: set[int] = set()
    while todo:
        check_cancelled(limits.cancellation)
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if is_array(node):
            return True
        todo.extend(
            child
            for child in nodes.held(node)
            if nodes.is_container(child) and (is_array(child) or not _is_little(child))
        )
    return False


def _is_little(node: Inert) -> bool:
    """Say whether a container holds so little that no array is in it."""
    return nodes.is_small(node) or nodes.is_bare(node)
