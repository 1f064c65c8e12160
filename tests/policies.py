from flow_grpo.models import ModelAdapter
from flow_grpo.sampling.rollout import Dynamics
from flow_grpo.training.policy import Policy


def policy_of(adapter: ModelAdapter, **settings) -> Policy:
    """For tests of weights, to which it does not matter how the model is walked."""
    return Policy(adapter, Dynamics(adapter.schedule(2, 32, 32)), **settings)
