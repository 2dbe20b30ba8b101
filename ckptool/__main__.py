"""``python -m ckptool`` and ``ckptool``: start the command line. An interrupt never prints a traceback."""

import gc
import os


def main() -> None:
    """Run the command line. An interrupt ends it with 130, as a shell expects, also while modules are imported."""
    # Imports, reading and writing make many objects and almost no cyclic garbage: a collection after every 700 objects,
    # Python's default, takes longer than the work. One per million is enough for files whose objects form cycles.
    gc.set_threshold(1_000_000)
    try:
        from ckptool.cli import main as run

        run()
    except KeyboardInterrupt:
        os._exit(130)


if __name__ == "__main__":
    main()
