"""The command line of tierstore: one file a command; main.py holds the group."""
