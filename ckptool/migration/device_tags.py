"""The device tags that storages get in a migrated file: one for all, or for each old tag a new one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

from ckptool.tensors.tensor import TensorInfo

DeviceTags: TypeAlias = str | Mapping[str, str]
"""One tag for everything, or new tags by old ones, as ``map_location`` takes them: others stay."""


def new_tag(tags: DeviceTags | None, old: str) -> str:
    """Return the tag that takes the place of another."""
    if tags is None or isinstance(tags, str):
        return tags or old
    return tags.get(old, old)


def retagged(info: TensorInfo, tags: DeviceTags | None) -> str:
    """Return the tag of a tensor in the new file; one on the meta device has no storage to be tagged."""
    return new_tag(tags, info.location) if info.storage or info.parts else info.location


def label(tags: DeviceTags | None) -> str | None:
    """Return tags as part of a file's name."""
    return tags if tags is None or isinstance(tags, str) else "-".join(dict.fromkeys(tags.values())) or None


def not_there(tags: DeviceTags | None, there: Collection[str]) -> tuple[str, ...]:
    """Return the old tags that a mapping names and a file does not have."""
    return () if tags is None or isinstance(tags, str) else tuple(tag for tag in tags if tag not in there)
