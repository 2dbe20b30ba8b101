"""What a worker process of ``scan`` does: it reads a path from each line, and answers with a row in a line."""

from __future__ import annotations

import gc
import json
import sys

from ckptool.checking.row import Asked, row

READY = b"ready"


def main() -> None:
    """Answer until there are no more lines, or nobody reads the answers."""
    gc.set_threshold(1_000_000)  # as in ``ckptool.__main__``
    lines, answers = sys.stdin.buffer, sys.stdout.buffer
    asked = Asked(**json.loads(lines.readline()))
    try:
        answers.write(READY + b"\n")
        answers.flush()
        for line in lines:
            answers.write(json.dumps(row(json.loads(line), asked), allow_nan=False).encode() + b"\n")
            answers.flush()
    except (BrokenPipeError, KeyboardInterrupt):
        return
