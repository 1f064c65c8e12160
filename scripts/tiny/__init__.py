"""The small text-to-image model assets/tiny-sd3: images, prompts and pretraining."""
