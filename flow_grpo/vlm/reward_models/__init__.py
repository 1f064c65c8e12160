"""Train reward models from pairs of responses, and score responses to questions with images."""
