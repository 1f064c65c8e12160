from flow_grpo.models import ModelAdapter
from flow_grpo.sampling.rollout import Dynamics
from flow_grpo.training.policy import Policy
from flow_grpo.training.snapshot import Snapshot


def policy_of(adapter: ModelAdapter, **settings) -> Policy:
    """For tests of weights, to which it does not matter how the model is walked."""
    policy = Policy(adapter, Dynamics(adapter.schedule(2, 32, 32)), **settings)
    policy.reference = Snapshot(policy.trained(), "reference")
    return policy
