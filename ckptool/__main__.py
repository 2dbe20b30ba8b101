"""``python -m ckptool``."""

from ckptool.cli import main

if __name__ == "__main__":
    main()
