"""Train assets/tiny-edit from scratch; see `--help` and its model card."""

from tiny_edit.pretrain import main

if __name__ == "__main__":
    main()
