"""File access: atomic writes, locks, strict parsers and checkpoint folders. No Megatron-Core, no ranks."""
