"""Videos, prompts and pretraining of assets/tiny-video, a small model of videos with sound."""
