"""The doctor: trials, versions, support matrix, requirements of a config."""
