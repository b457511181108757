"""Every replacement of a Megatron-Core name: the mechanism (patching), and the replacements as data."""
