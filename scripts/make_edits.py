"""Writes dataset/edits: pictures of coloured shapes and how to edit them; see `--help`."""

from tiny_edit.data import main

if __name__ == "__main__":
    main()
