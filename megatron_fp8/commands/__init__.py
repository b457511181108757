"""The command line, one module per command. main.py dispatches; cli_common.py has shared code."""
