from flow_grpo.diffusion.models import ModelAdapter
from flow_grpo.diffusion.policy import Policy
from flow_grpo.diffusion.rollout import Dynamics
from flow_grpo.training.snapshot import Snapshot


def make_policy(adapter: ModelAdapter, **settings) -> Policy:
    """Return a policy with a fixed two-step schedule, for tests of its weights."""
    policy = Policy(adapter, Dynamics(adapter.schedule(2, 32, 32)), **settings)
    policy.reference = Snapshot(policy.trained_parameters(), "reference")
    return policy
