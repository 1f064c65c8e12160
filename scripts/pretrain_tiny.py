"""Makes the small model that ships in assets/tiny-sd3; see `--help` and its model card."""

from tiny.pretrain import main

if __name__ == "__main__":
    main()
