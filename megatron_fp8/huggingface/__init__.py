"""Import and export of Hugging Face checkpoints, in BF16 and FP8.

architectures   what the models are called, and which tensor is which: data
config          config.json <-> the run config's model section
mixture, latent, rotary
                its parts for experts, latent attention and positions
layout          Megatron-Core's fused matrices <-> the parts they are made of
formats         FP8 weights as compressed-tensors and as DeepSeek's 128x128 blocks write them
block_scales    scales that a weight came with, kept until it goes out again
directory       sharded safetensors, read and written
source          a checkpoint, as an export reads it
companions      what stands beside the tensors: config.json, the tokenizer
incoming        what a checkpoint will hold of a directory, made tensor by tensor
exporter        a checkpoint becomes a directory
importer        a directory becomes a checkpoint

Everything but the importer's last step works on names and tensors alone, without ranks and without Megatron-Core.
"""
