"""Import and export of Hugging Face checkpoints, in BF16 and FP8.

    architectures   model families and tensor name mappings: data
    config          config.json <-> the run config's model section
    mixture, latent, rotary
                    its parts for experts, latent attention and positions
    layout          Megatron-Core's fused matrices <-> their parts
    formats         FP8 weights as in compressed-tensors and in DeepSeek's 128x128 blocks
    block_scales    scales of imported weights, stored for a later export
    directory       reads and writes sharded safetensors
    source          a checkpoint, as an export reads it
    companions      files besides the tensors: config.json, the tokenizer
    incoming        the plan of an import: checkpoint tensors made one by one
    exporter        checkpoint -> directory
    importer        directory -> checkpoint

Except for the importer's last step everything works on names and tensors only, without ranks and without
Megatron-Core.
"""
