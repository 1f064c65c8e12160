"""Write dataset/moving_shapes: prompts of moving shapes that beep; see `--help`."""

from tiny_video.prompts import main

if __name__ == "__main__":
    main()
