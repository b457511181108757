"""Import and export of Hugging Face checkpoints, in BF16 and FP8.

    architectures     model families and tensor name mappings: data
    config            config.json <-> the run config's model section
    moe, rotary       its parts for experts and positions
    layout            Megatron-Core's fused matrices <-> their parts
    formats           quantized weights as compressed-tensors, DeepSeek and modelopt store them
    weight_decoder    reads such weights
    block_scales      scales of imported weights, stored for a later export
    directory         reads and writes sharded safetensors
    checkpoint_reader a checkpoint, as an export reads it
    import_plan       checkpoint tensors made one by one, shared among ranks
    weight_plan       names, source tensors and casts of exported tensors
    exporter          checkpoint -> directory
    aux_files         its files besides the tensors
    importer          directory -> checkpoint
    frozen_model      directory -> a model of transformers with its codes as frozen weights

Except for the importer's last step everything works on names and tensors only, without ranks and without
Megatron-Core.
"""

QUANTIZED_FORMATS = (
    "fp8-tensor",
    "fp8-channel",
    "fp8-block",
    "mxfp8",
    "nvfp4",
    "nvfp4-modelopt",
    "mxfp8-modelopt",
)
"""Names of export formats (formats.py). Importing this package does not import torch."""
