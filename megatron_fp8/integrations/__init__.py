"""Callbacks for training loops of other libraries: transformers' Trainer, Lightning, accelerate.

Each ends the FP8 iteration before the optimizer's step, stores the FP8 state beside the library's own checkpoint, and
logs FP8 counts. Import one: ``megatron_fp8.integrations.transformers``, ``.lightning``, ``.accelerate``.
"""
