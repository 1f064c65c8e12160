"""The small model that ships in the repo: its pictures, its prompts and its pretraining."""
