"""Callbacks for training loops of other libraries: transformers' Trainer, Lightning, accelerate.

Each ends the FP8 iteration before the optimizer's step, keeps the FP8 state beside the library's own checkpoint, and logs
what FP8 counted. Import the one you need: ``megatron_fp8.integrations.transformers``, ``.lightning``, ``.accelerate``.
"""
