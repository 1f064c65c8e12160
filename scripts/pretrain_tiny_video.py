"""Train assets/tiny-video from scratch; see `--help` and its model card."""

from tiny_video.pretrain import main

if __name__ == "__main__":
    main()
