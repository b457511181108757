"""The training app: one typed config, real text, Megatron-Core's own step."""
