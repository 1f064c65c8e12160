"""The small vision-language model assets/tiny-vlm: images, questions and pretraining."""
