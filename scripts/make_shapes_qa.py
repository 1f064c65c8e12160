"""Write dataset/shapes_qa: questions about images of coloured shapes; see `--help`."""

from tiny_vlm.data import main

if __name__ == "__main__":
    main()
