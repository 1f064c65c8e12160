"""Train a small model of video with sound from scratch; see `--help`."""

from tiny_video.pretrain import main

if __name__ == "__main__":
    main()
