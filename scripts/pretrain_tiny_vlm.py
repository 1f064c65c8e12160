"""Train assets/tiny-vlm from scratch; see `--help` and its model card."""

from tiny_vlm.pretrain import main

if __name__ == "__main__":
    main()
