"""A pickled tree → the nodes of an edited file: storages stay where they are, and keep their keys."""

from __future__ import annotations

from typing import NoReturn

from ckptool.migration.device_tags import new_tag
from ckptool.migration.output.editing import not_in_place
from ckptool.migration.tree_rewriter import StorageId, TreeRewriter
from ckptool.pickles import nodes
from ckptool.pickles.nodes import Call, Global, Inert, PersistentId
from ckptool.sources.files import FileSource
from ckptool.tensors.payloads import StoragePayload
from ckptool.tensors.tensor import StorageRef


class KeepsMembers(TreeRewriter):
    """For a zip whose members stay."""

    def _storage(self, storage: StorageRef, cls: Global, itemsize: int, unit: int) -> StorageId:
        key, new = storage.key, new_tag(self._location, storage.location)
        if key not in self._units:
            if not isinstance(storage.source, FileSource):  # deflated, or in the pickle itself
                _refuse_inner()
            self._units[key] = unit
            self.storages.append(StoragePayload(storage, unit))
            self._count(storage.location, new)
        return cls, key, new, storage.nbytes // itemsize


class KeepsStream(TreeRewriter):
    """For a legacy stream whose storages stay: everything in its tree stays as well, but for what names a device."""

    def _persistent_id(self, node: PersistentId) -> Inert:
        found = None if nodes.sourced_class(node.pid) else self._rebuilder.storage(node)
        if found is None or not isinstance(node.pid, tuple):
            return node
        storage = found.ref.whole or found.ref
        new = new_tag(self._location, storage.location)
        if storage.key not in self._units:
            self._units[storage.key] = 1
            self.storages.append(StoragePayload(storage, 1))
            self._count(storage.location, new)
        if new == storage.location:
            return node
        return self._finish(PersistentId((*node.pid[:3], new, *node.pid[4:])))

    def _call(self, node: Call) -> Inert:
        func = nodes.global_of(node.func)
        if func is None:
            return node
        if (func.module, func.name) == ("torch.storage", "_load_from_bytes"):
            _refuse_inner()
        return self._moved(node, func)


def _refuse_inner() -> NoReturn:
    raise not_in_place("it has tensors that are not stored as they are: compressed, or in the pickle itself")
