"""Bytes, read at a position: of files, memory and folders; and of what is far away, at addresses of these schemes."""

from typing import Final

WEB: Final = ("https", "http")
STORES: Final = ("s3", "gs", "az")
HUB: Final = "hf"
