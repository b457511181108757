"""The doctor: trials, versions, support matrix, needs of a config."""
