"""Settings under Megatron-Core: `TransformerConfig` with this package's FP8 fields, and what every field may be."""
