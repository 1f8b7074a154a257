"""The one exception for wrong input.  The command line prints its message on one line and exits with 2."""


class UserError(Exception):
    """Wrong input, found before anything expensive starts: the message names the key, the value and the remedy."""
