"""The command line of tierstore."""
