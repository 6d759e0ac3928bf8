"""The command line of tierstore."""

INTERRUPTED = 130
"""The exit code of programs that SIGINT ends, in a shell."""
