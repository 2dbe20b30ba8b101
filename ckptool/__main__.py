"""``python -m ckptool`` and ``ckptool``: the command line, from the first moment on without a traceback."""

import os


def main() -> None:
    """Run the command line. An interrupt ends it with 130, as a shell expects, also while modules are imported."""
    try:
        from ckptool.cli import main as run

        run()
    except KeyboardInterrupt:
        os._exit(130)


if __name__ == "__main__":
    main()
