from flow_grpo.draw.models import ModelAdapter
from flow_grpo.draw.policy import Policy
from flow_grpo.draw.rollout import Dynamics
from flow_grpo.run.snapshot import Snapshot


def policy_of(adapter: ModelAdapter, **settings) -> Policy:
    """For tests of weights, to which it does not matter how the model is walked."""
    policy = Policy(adapter, Dynamics(adapter.schedule(2, 32, 32)), **settings)
    policy.reference = Snapshot(policy.trained(), "reference")
    return policy
