"""The small vision-language model: its pictures, its questions and its pretraining."""
