"""
What an index shows of the package: its description, links and classifiers.

CKPTOOL_REPOSITORY is the address of the repository on the web, without a slash at the end. All links of the
description and of the metadata are made of it. A build without it is for this machine: no index takes it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# What is for readers of a clone, and what is for readers of an index, where the links are none.
_CLONE = re.compile(r"<!-- clone -->\n.*?<!-- /clone -->\n", re.DOTALL)
_INDEX = re.compile(r"<!-- index\n(.*?)/index -->\n", re.DOTALL)
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)")


class Metadata(MetadataHookInterface):
    """Adds ``readme``, ``classifiers`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = os.environ.get("CKPTOOL_REPOSITORY", "").rstrip("/")
        text = Path(self.root, "README.md").read_text("utf-8")
        classifiers = list(self.config["classifiers"])
        if repository:
            files = f"{repository}/blob/v{metadata['version']}"
            text = _LINK.sub(rf"{files}/\1", _INDEX.sub(r"\1", _CLONE.sub("", text)))
            metadata["urls"] = {
                "Source": repository,
                "Documentation": f"{files}/docs/concepts.md",
                "Changelog": f"{files}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
        else:
            classifiers.append("Private :: Do Not Upload")  # indexes refuse it by this line
            metadata["urls"] = {}
        metadata["classifiers"] = classifiers
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
