"""Train assets/tiny-sd3 from scratch; see `--help` and its model card."""

from tiny.pretrain import main

if __name__ == "__main__":
    main()
