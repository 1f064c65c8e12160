"""The small image-editing model assets/tiny-edit: scenes, instructions and pretraining."""
