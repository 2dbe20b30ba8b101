"""``python -m ckptool`` and ``ckptool``: the command line, from the first moment on without a traceback."""

import gc
import os


def main() -> None:
    """Run the command line. An interrupt ends it with 130, as a shell expects, also while modules are imported."""
    # What is imported, read and written holds no garbage, and grows large: to look for some after every 700 objects, as
    # Python does, takes longer than the work. Every million is enough for files that hold themselves.
    gc.set_threshold(1_000_000)
    try:
        from ckptool.cli import main as run

        run()
    except KeyboardInterrupt:
        os._exit(130)


if __name__ == "__main__":
    main()
