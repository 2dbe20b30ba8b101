"""Bytes, read at a position: of files, memory, folders, and what is far away at an address."""

from typing import Final

WEB: Final = ("https", "http")
STORES: Final = ("s3", "gs", "az")
HUB: Final = "hf"
