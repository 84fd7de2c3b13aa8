"""``python -m raymerge.cli``: the command, where no script of it is on the path."""

from raymerge.cli.main import main

if __name__ == "__main__":
    main()
