"""The command line: one file a command. main.py finds them; line.py holds what all share."""
