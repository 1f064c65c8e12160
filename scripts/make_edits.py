"""Write dataset/edits: images of coloured shapes with edit instructions; see `--help`."""

from tiny_edit.data import main

if __name__ == "__main__":
    main()
