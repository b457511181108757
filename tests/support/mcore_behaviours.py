"""What Megatron-Core does, as a kept list: each entry builds a model, uses it, and gives numbers to compare.

Every behaviour runs in a rank, in one of two settings: after install(), and with `plain_megatron()`, which keeps only
what Megatron-Core needs to run on a CPU at all. `fp8` are the fields that switch FP8 on, or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.support.gpt import gpt_config, train
from benchmarks.support.ranks import Layout, model_parallel

VOCAB, SEQUENCE = 128, 32
SMALL = {"hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4}
Numbers = dict[str, Any]


@contextlib.contextmanager
def plain_megatron() -> Iterator[None]:
    """Megatron-Core without the FP8 hooks, on the stand-ins that it needs on a CPU."""
    from megatron_fp8 import mcore
    from megatron_fp8.mcore.patches import cpu_engine, missing_packages
    from megatron_fp8.mcore.patches.patching import PatchSet

    mcore.uninstall()
    stand_ins = PatchSet([*missing_packages.without_te, *cpu_engine.patches()])
    stand_ins.apply()
    try:
        yield
    finally:
        stand_ins.revert()
        mcore.install()


def run(name: str, plain: bool, fp8: dict[str, Any]) -> Numbers:
    """A rank case: one behaviour's numbers, or {'error': ...} of the first line that it failed with."""
    behaviour, layout = BEHAVIOURS[name]
    with model_parallel(layout), plain_megatron() if plain else contextlib.nullcontext():
        try:
            return behaviour(layout, fp8)
        except (
            ValueError,
            RuntimeError,
            AssertionError,
            NotImplementedError,
            TypeError,
            ImportError,
        ) as error:
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


# ------------------------------------------------------------------------------------------------------------- behaviours


def _local_layer(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
    )


def _local_block(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization
    )


def trained(
    spec: Callable[[Any], Any] = _local_layer, **fields: Any
) -> Callable[[Layout, dict[str, Any]], Numbers]:
    """Two optimizer steps of a GPT by Megatron-Core's schedule, DDP and Adam."""

    def behaviour(layout: Layout, fp8: dict[str, Any]) -> Numbers:
        config = _gpt_config(layout, {**fields, **fp8})
        distributed = fields.get("llama", True) and layout.ep == 1
        made = train(
            config, spec=spec, steps=2, sequence=SEQUENCE, vocab=VOCAB, global_batch=4,
            ddp={"use_distributed_optimizer": distributed},
        )  # fmt: skip
        weights = [p for chunk in made.chunks for p in chunk.parameters()]
        return _numbers(made.losses, made.grad_norms, weights, model=made.chunks[0])

    return behaviour


def mtp(layout: Layout, fp8: dict[str, Any]) -> Numbers:
    """Multi-token prediction."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    config = _gpt_config(layout, {**fp8, "mtp_num_layers": 1})
    layers = _local_block(config)
    block = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False)
    model = GPTModel(config, layers, VOCAB, SEQUENCE, mtp_block_spec=block, position_embedding_type="rope")
    return _two_iterations(model.bfloat16(), _gpt_loss)


def bert(layout: Layout, fp8: dict[str, Any]) -> Numbers:
    """BERT, with padding masked."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    config = _gpt_config(layout, {**fp8, "llama": False})
    model = BertModel(config, 2, bert_layer_local_spec, VOCAB, SEQUENCE).bfloat16()

    def loss(model: Any) -> Tensor:
        tokens, _ = _tokens()
        mask = torch.ones_like(tokens)
        mask[:, -5:] = 0
        return model(tokens, mask, torch.zeros_like(tokens), lm_labels=tokens)[0].float().mean()

    return _two_iterations(model, loss)


def t5(layout: Layout, fp8: dict[str, Any]) -> Numbers:
    """T5: an encoder, a decoder, cross attention."""
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import (
        get_t5_decoder_with_local_block_spec,
        get_t5_encoder_with_local_block_spec,
    )

    config = _gpt_config(layout, {**fp8, "llama": False})
    model = T5Model(
        config, config, get_t5_encoder_with_local_block_spec(2), get_t5_decoder_with_local_block_spec(2),
        VOCAB, SEQUENCE,
    ).bfloat16()  # fmt: skip

    def loss(model: Any) -> Tensor:
        tokens, _ = _tokens()
        seen = torch.zeros(2, 1, SEQUENCE, SEQUENCE, dtype=torch.bool)
        causal = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1).expand_as(seen)
        return model(tokens, tokens, seen, causal, seen, lm_labels=tokens).float().mean()

    return _two_iterations(model, loss)


def vision(kind: str) -> Callable[[Layout, dict[str, Any]], Numbers]:
    """A vision transformer alone: CLIP's or RADIO's, from Megatron-Core's local spec."""

    def behaviour(layout: Layout, fp8: dict[str, Any]) -> Numbers:
        from megatron.core.models.vision.clip_vit_model import CLIPViTModel
        from megatron.core.models.vision.radio import RADIOViTModel
        from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec

        config, sizes = (
            _gpt_config(layout, {**fp8, "llama": False}),
            {"img_h": 32, "img_w": 32, "patch_dim": 8},
        )
        torch.manual_seed(1)
        if kind == "clip":
            model = CLIPViTModel(config, get_vit_layer_with_local_spec(), **sizes)
        else:
            most = {"max_img_h": 64, "max_img_w": 64}
            model = RADIOViTModel(config, get_vit_layer_with_local_spec(), **sizes, **most)
        images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
        model.train()
        return _two_iterations(model.bfloat16(), lambda model: model(images).float().square().mean())

    return behaviour


def llava(language_fp8: bool = True, vision_fp8: bool = True) -> Callable[[Layout, dict[str, Any]], Numbers]:
    """LLaVA: a vision transformer, a projection and a GPT, each with a config of its own."""

    def behaviour(layout: Layout, fp8: dict[str, Any]) -> Numbers:
        model = _llava(layout, fp8 if language_fp8 else {}, fp8 if vision_fp8 else {})
        images = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(3)).bfloat16()
        tokens = _tokens()[0][:1].clone()
        tokens[0, 3] = -200  # the place of the image
        seen = torch.ones(tokens.shape)

        def loss(model: Any) -> Tensor:
            output, _ = model(images, tokens, None, None, labels=tokens.clamp(0), loss_mask=seen)
            return output.float().mean()

        if fp8:
            model.set_is_first_microbatch()  # as each of Megatron-Core's schedules does
        found = _two_iterations(model, loss)
        if fp8:
            from megatron_fp8.mcore.runtime import state_of

            # The language model inside it has names of the whole one, and one state.
            sites = [module.fp8_site for module in model.modules() if hasattr(type(module), "bind_fp8_site")]
            assert {id(site.state) for site in sites} == {id(state_of(model.config))}
            assert len({site.plan.name for site in sites}) == len(sites) == (18 if vision_fp8 else 8)
            assert {site.plan.name.split(".")[0] for site in sites} <= {
                "language_model",
                "vision_model",
                "vision_projection",
            }
        return found

    return behaviour


def _llava(layout: Layout, language: dict[str, Any], vision: dict[str, Any]) -> Any:
    from megatron.core.models.multimodal.llava_model import LLaVAModel
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules

    configs = [_gpt_config(layout, {**fields, "llama": False}) for fields in (language, vision, vision)]
    configs[0].language_model_type, configs[1].vision_model_type = "", "internvit"
    torch.manual_seed(1)
    return LLaVAModel(
        configs[0], _local_layer(configs[0]), VOCAB, 2 * SEQUENCE,
        configs[1], get_vit_layer_with_local_spec(), False,
        configs[2], MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
        img_h=28, img_w=28, language_position_embedding_type="rope",
    ).bfloat16()  # fmt: skip


def mamba(layout: Layout, fp8: dict[str, Any]) -> Numbers:
    """A hybrid of attention and MLP layers, which needs no kernel of Mamba's."""
    from megatron.core.models.mamba import MambaModel
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

    config = _gpt_config(layout, {**fp8, "is_hybrid_model": True})
    model = MambaModel(config, mamba_stack_spec, VOCAB, SEQUENCE, hybrid_override_pattern="*-")
    return _two_iterations(model.bfloat16(), _gpt_loss)


def heterogeneous(replaced: bool) -> Callable[[Layout, dict[str, Any]], Numbers]:
    """Layers of several kinds by a JSON file; ``replaced``: one MLP is a single linear."""

    def behaviour(layout: Layout, fp8: dict[str, Any]) -> Numbers:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
            get_gpt_heterogeneous_layer_spec,
        )
        from megatron.core.transformer.heterogeneous.heterogeneous_config import (
            HeterogeneousTransformerConfig,
        )

        attention = {"no_op": False, "replace_with_linear": False, "num_query_groups": 2}
        mlp = {"no_op": False, "replace_with_linear": False, "ffn_hidden_size": 256}
        other = (
            {**mlp, "replace_with_linear": True, "ffn_hidden_size": None}
            if replaced
            else {**mlp, "ffn_hidden_size": 128}
        )
        none = {"no_op": True, "replace_with_linear": False, "num_query_groups": None}
        blocks = [{"attention": attention, "mlp": mlp}, {"attention": none, "mlp": other}]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "layers.json"
            path.write_text(json.dumps({"block_configs": blocks}))
            options = {**SMALL, **fp8, "heterogeneous_layers_config_path": str(path)}
            config = gpt_config(layout, cls=HeterogeneousTransformerConfig, **options)
        spec = get_gpt_heterogeneous_layer_spec(config, use_te=False)
        model = GPTModel(config, spec, VOCAB, SEQUENCE, position_embedding_type="rope").bfloat16()
        return _two_iterations(model, _gpt_loss)

    return behaviour


def round_trip(layout: Layout, fp8: dict[str, Any]) -> Numbers:
    """state_dict() into another model: experts split over tensor parallelism, as Megatron-Core's default has it."""
    first, second = (_gpt(layout, {**fp8, **EXPERTS}) for _ in range(2))
    missing = second.load_state_dict(first.state_dict(), strict=False)
    with torch.no_grad():
        same = torch.equal(_gpt_loss(first.eval()), _gpt_loss(second.eval()))
    keys = sorted(key for key in first.state_dict() if not key.endswith("_extra_state"))
    return {"keys": _digest(keys), "same": same, "missing": list(missing.missing_keys)}


def generation(layout: Layout, fp8: dict[str, Any]) -> Numbers:
    """Megatron-Core's static inference engine."""
    from unittest import mock

    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.engines.static_engine import StaticInferenceEngine
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
    from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
        InferenceWrapperConfig,
    )
    from megatron.core.inference.sampling_params import SamplingParams
    from megatron.core.inference.text_generation_controllers.text_generation_controller import (
        TextGenerationController,
    )

    wrapper = InferenceWrapperConfig(
        hidden_size=128, inference_batch_times_seqlen_threshold=400, inference_max_requests=2,
        fp32_residual_connection=False, params_dtype=torch.bfloat16, padded_vocab_size=VOCAB,
    )  # fmt: skip
    model = _gpt(layout, fp8).eval()
    wrapped = GPTInferenceWrapper(model, wrapper, StaticInferenceContext.from_config(wrapper))
    tokenizer = mock.Mock(vocab_size=VOCAB, eod=VOCAB - 1, bos=None)
    tokenizer.tokenize.side_effect = lambda text, *_: [ord(c) % VOCAB for c in text]
    tokenizer.detokenize.side_effect = lambda tokens, *_, **__: " ".join(map(str, tokens))
    tokenizer.offsets.side_effect = lambda tokens, text: list(range(len(tokens)))
    engine = StaticInferenceEngine(
        TextGenerationController(inference_wrapped_model=wrapped, tokenizer=tokenizer), legacy=True
    )
    done = engine.generate(
        ["abc", "defgh"], sampling_params=SamplingParams(num_tokens_to_generate=4, top_k=1)
    )
    return {"digest": _digest([list(map(int, request.generated_tokens)) for request in done])}


def packed(layout: Layout, fp8: dict[str, Any]) -> Numbers:
    """Packed sequences, for which Megatron-Core's own attention has no code."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, 10, SEQUENCE], dtype=torch.int32)
    options = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 22, "max_seqlen_kv": 22}
    params = PackedSeqParams(qkv_format="thd", **options)
    model = _gpt(layout, fp8)

    def loss(model: Any) -> Tensor:
        tokens, places = (x[:1] for x in _tokens())
        return model(tokens, places, None, labels=tokens, packed_seq_params=params).float().mean()

    return _two_iterations(model, loss)


EXPERTS = {
    "num_moe_experts": 2,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}
ONE, TWO = Layout(), Layout(tp=2)
# One rank each of tensor parallelism, but where the behaviour is about it; experts then need one tensor-parallel rank.
BEHAVIOURS: dict[str, tuple[Callable[[Layout, dict[str, Any]], Numbers], Layout]] = {
    "gpt-llama": (trained(), TWO),
    "gpt-layernorm": (trained(llama=False), ONE),
    "experts": (trained(**EXPERTS), Layout(tp=2, etp=1, sp=True)),
    "experts-with-bias": (trained(llama=False, bias_activation_fusion=False, **EXPERTS), ONE),
    "experts-of-megatron-config": (trained(**EXPERTS, megatron_config=True), ONE),
    "fused-softmax": (trained(llama=False, masked_softmax_fusion=True, attention_dropout=0.1), ONE),
    "fused-rope": (trained(apply_rope_fusion=True, persist_layer_norm=True, megatron_config=True), ONE),
    "expert-layers": (trained(_local_block, **EXPERTS, moe_layer_freq=[0, 1]), ONE),
    "mtp": (mtp, ONE),
    "bert": (bert, ONE),
    "t5": (t5, ONE),
    "clip": (vision("clip"), ONE),
    "radio": (vision("radio"), ONE),
    "llava": (llava(), ONE),
    "llava-language-alone": (llava(vision_fp8=False), ONE),
    "llava-vision-alone": (llava(language_fp8=False), ONE),
    "mamba": (mamba, ONE),
    "heterogeneous": (heterogeneous(False), ONE),
    "heterogeneous-linear": (heterogeneous(True), ONE),
    "round-trip": (round_trip, TWO),
    "generation": (generation, ONE),
    "packed": (packed, ONE),
}


# ---------------------------------------------------------------------------------------------------------------- helpers


def _gpt_config(layout: Layout, fields: dict[str, Any]) -> Any:
    from megatron_fp8 import TransformerConfig

    plain = fields.get("megatron_config", False) or not fields.get("fp8")
    options = {name: value for name, value in fields.items() if name != "megatron_config"}
    return gpt_config(layout, cls=None if plain else TransformerConfig, **{**SMALL, **options})


def _gpt(layout: Layout, fields: dict[str, Any]) -> Any:
    from megatron.core.models.gpt import GPTModel

    config = _gpt_config(layout, fields)
    return GPTModel(config, _local_layer(config), VOCAB, SEQUENCE, position_embedding_type="rope").bfloat16()


def _tokens() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(VOCAB, (2, SEQUENCE), generator=generator), torch.arange(SEQUENCE).expand(2, -1)


def _gpt_loss(model: Any) -> Tensor:
    tokens, places = _tokens()
    return model(tokens, places, None, labels=tokens).float().mean()


def _two_iterations(model: Any, loss_of: Callable[[Any], Tensor]) -> Numbers:
    """A loop of one's own: forward, backward, the end of the FP8 iteration, torch's optimizer."""
    from megatron_fp8.mcore.iteration import finish_iteration

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, grads = [], []
    for _ in range(2):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        if model.config.fp8:
            finish_iteration([model])
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        losses.append(float(loss))
    return _numbers(losses, [], grads, model=model)


def _numbers(losses: list[float], norms: list[float], tensors: list[Tensor], model: Any) -> Numbers:
    from megatron_fp8.mcore.iteration import iteration_counts

    counted = iteration_counts()["fp8_gemms"] if _config(model).fp8 else 0
    return {"losses": losses, "norms": norms, "fp8_gemms": counted, "digest": _digest(tensors)}


def _config(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model.config


def _digest(values: Any) -> str:
    digest = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            digest.update(value.detach().float().contiguous().numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()[:16]
