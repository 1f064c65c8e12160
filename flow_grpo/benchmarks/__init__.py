"""Benchmarks with pinned protocols: the table of protocols, prompts, formulas and results."""
