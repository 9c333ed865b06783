"""The errors that a user is meant to read."""


class CoterieError(Exception):
    """Something the user can mend: the message is one clear sentence, shown without a traceback."""


class Diverged(CoterieError):
    """Training came to a loss that is not finite."""
