"""The small model of video with sound assets/tiny-video: videos, prompts and pretraining."""
