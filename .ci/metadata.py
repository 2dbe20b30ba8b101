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

# How to install it from a clone, and from an index.
_CLONE = re.compile(r"ckptool is not on a package index yet\..*?(?=On\s+Linux, pip's)", re.DOTALL)
_INDEX = """\
Python 3.10 or later:

```sh
pip install ckptool           # small, 10 MB: inspect, check, compare, and migrate without casts
pip install "ckptool[stat]"   # and numpy, for stat
pip install "ckptool[torch]"  # everything: also casts, how far values differ, loading into models and servers
```

`ckptool example` writes a small checkpoint to try the verbs on. The files of the examples below are
[fixtures](fixtures/README.md) of the repository.

Any torch from 2.1 works. """
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)")


class Metadata(MetadataHookInterface):
    """Adds ``readme``, ``classifiers`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = os.environ.get("CKPTOOL_REPOSITORY", "").rstrip("/")
        text = Path(self.root, "README.md").read_text("utf-8")
        classifiers = list(self.config["classifiers"])
        if repository:
            files = f"{repository}/blob/v{metadata['version']}"
            text, count = _CLONE.subn(_INDEX, text)
            if not count:
                raise ValueError("README.md no longer says how to install from a clone: mend .ci/metadata.py")
            text = _LINK.sub(rf"{files}/\1", text)
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
