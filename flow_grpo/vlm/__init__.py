"""Reinforcement learning of vision-language and language models: the parts of scripts/train_vlm.py.

A question is encoded as a prompt (prompts.py), responses to it are sampled (sampling.py,
decoding.py) and trained through the log-probabilities of their tokens (network.py, objective.py).
Model families are in models/, policy losses in losses/. Advantages, rewards, checkpoints and
tracking are shared with the diffusion trainer.
"""
