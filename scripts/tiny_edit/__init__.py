"""The small model that edits pictures: its scenes, its instructions and its pretraining."""
