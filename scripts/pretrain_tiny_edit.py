"""Makes the small model that ships in assets/tiny-edit; see `--help` and its model card."""

from tiny_edit.pretrain import main

if __name__ == "__main__":
    main()
