"""Built-in environments: each module is one tool that a model calls in multi-turn episodes."""
