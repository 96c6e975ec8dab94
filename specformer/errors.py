"""The one exception that is meant for people."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend: the message says what was wrong, which value, and what to do.

    The command line prints the message without a traceback and exits with status 2; library
    users catch it like any other exception.
    """
