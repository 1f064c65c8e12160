"""A small LTX-2 of video with sound: videos, prompts and pretraining; not shipped yet."""
