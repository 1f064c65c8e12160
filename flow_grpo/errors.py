class UserError(Exception):
    """A mistake the user can mend. Scripts print it as one line, without a traceback."""
