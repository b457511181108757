"""The command line, one module per command. main.py dispatches; line.py has shared code."""
