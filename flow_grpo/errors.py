class UserError(Exception):
    """A mistake the user can mend. Scripts print it as one line, without a traceback."""


class RewardError(UserError):
    """A reward that breaks the contract, perhaps on one process alone."""
