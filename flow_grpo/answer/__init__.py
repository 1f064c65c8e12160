"""Models that look at pictures and answer: the parts of scripts/train_vlm.py.

A question becomes a prompt (prompts.py), answers to it are sampled (sampling.py) and trained by the
log-probabilities of their tokens (network.py, objective.py). What sets models apart is in models/,
what sets losses apart in losses/. Advantages, rewards, checkpoints, resume and tracking are those
of the image trainer.
"""
