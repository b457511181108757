"""docs/finetune.md is true: its programs run as written, but for the model, and its table is what conversion reports."""

from __future__ import annotations

import json
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fp8.commands.main import main as command_line
from megatron_fp8.inference import prepare_for_inference
from megatron_fp8.nn import DEFAULT_SKIP, convert_to_fp8, fp8_step
from tests.support.command import ROOT
from tests.support.docs_blocks import blocks
from tests.support.long_cases import some
from tests.support.process_state import put_back

PAGE = ROOT / "docs" / "finetune.md"
PROGRAM, ADAPTERS, COMPARISON = (block.text for block in blocks(PAGE) if block.language == "python")
COMMANDS = [words for block in blocks(PAGE) for words in block.commands]

COMMON: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Qwen3": ("qwen3", {}),
    "Gemma 3": ("gemma3_text", {"sliding_window": 16}),
    "Mixtral": ("mixtral", EXPERTS),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6, "moe_intermediate_size": 128,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64,
        },
    ),
    "GPT-OSS": ("gpt_oss", {**EXPERTS, "sliding_window": 16}),
}  # fmt: skip


def build(family: str, **more: Any) -> Any:
    """A random model of the family, bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**COMMON, **fields, **more})
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16)


def tokens() -> torch.Tensor:
    return torch.randint(3, 256, (2, 32), generator=torch.Generator().manual_seed(1))


def command(*words: str | Path) -> int:
    with put_back():
        return command_line([str(word) for word in words])


# ---------------------------------------------------------------------------------------------------------- the programs


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with `model`, a Qwen3 whose tokens are bytes, and chats.jsonl; the current one."""
    import datasets
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_bytes = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    of_bytes.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=of_bytes, eos_token="<|end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    tokenizer.save_pretrained("model")
    build("Qwen3", tie_word_embeddings=True).save_pretrained("model")  # as Qwen3-0.6B's are
    rows: list[dict[str, Any]] = [{"text": f"{n} + {n} = " + f"{2 * n}." * (n % 3 + 1)} for n in range(8)]
    for n in range(8):
        answer = {"role": "assistant", "content": str(n * n)}
        rows.append({"messages": [{"role": "user", "content": f"{n} x {n}?"}, answer]})
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(program: str, *edits: tuple[str, str]) -> dict[str, Any]:
    """The names that a program of the page leaves; its model is the one in this folder."""
    for old, new in edits:
        assert program.count(old) == 1, old
        program = program.replace(old, new)
    names: dict[str, Any] = {"__name__": "finetune"}
    exec(compile(program.replace('"Qwen/Qwen3-0.6B"', '"model"'), str(PAGE), "exec"), names)
    return names


def with_adapters() -> str:
    """The program with the two changes of the page's second section."""
    head, data, _, *rest = re.split(r"^(?=# \d\. )", PROGRAM, flags=re.M)
    (old, new), *others = re.findall(r"In part 4 `([^`]+)` becomes `([^`]+)`", PAGE.read_text())
    assert "".join(rest).count(old) == 1 and not others
    return head + data + ADAPTERS + "".join(rest).replace(old, new)


def tuned() -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file("tuned/model.safetensors")


def assert_the_same_after_a_resume(program: str, *edits: tuple[str, str]) -> None:
    """Without its last checkpoint the program goes on from the one before, to the bits that are in `tuned`."""
    whole = tuned()
    shutil.rmtree("tuned")
    shutil.rmtree("runs/chats/checkpoint-6")
    assert Path("runs/chats/checkpoint-4/fp8_state.safetensors").is_file()
    trainer = run(program, *edits)["trainer"]
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [1, 2, 3, 4, 5, 6]
    resumed = tuned()
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name


def test_all_weights_are_trained_resumed_exported_and_loaded(here):
    from transformers import AutoModelForCausalLM

    names = run(PROGRAM)
    assert sorted(path.name for path in Path("runs/chats").iterdir()) == [
        f"checkpoint-{n}" for n in (2, 4, 6)
    ]
    assert len(names["model"].fp8_report.converted) == 14 and not names["model"].fp8_report.not_in_use
    assert all(row["labels"][-1] == names["tokenizer"].eos_token_id for row in names["rows"])
    losses = [row["loss"] for row in names["trainer"].state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
    assert_the_same_after_a_resume(PROGRAM)

    for program, *words in COMMANDS:
        assert program == "megatron-fp8" and command(*words) == 0, words
    known = run(COMPARISON)
    assert 0.005 < (known["fp8"] - known["plain"]).norm() / known["plain"].norm() < 0.1
    assert (
        Path("tuned-fp8/model.safetensors").stat().st_size
        < 0.45 * Path("tuned/model.safetensors").stat().st_size
    )

    again = prepare_for_inference(convert_to_fp8(AutoModelForCausalLM.from_pretrained("tuned"), "rowwise"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):  # as Trainer's bf16 has it
        wanted = names["trainer"].model.eval()(known["ids"]).logits
        assert torch.equal(again(known["ids"]).logits.float(), wanted)


@pytest.mark.parametrize("recipe", some(["rowwise", "delayed"], "delayed"))
def test_adapters_are_trained_resumed_and_merged(here, recipe):
    program, edits = with_adapters(), [('"rowwise"', f'"{recipe}"'), ("1e-5", "2e-4")]
    names = run(program, *edits)
    model = names["trainer"].model  # merged
    assert all(".lora_" not in name for name in model.fp8_report.converted)
    before = build("Qwen3", tie_word_embeddings=True).state_dict()
    changed = {
        re.sub(r"^model\.layers\.\d\.|\.weight$", "", name)
        for name, value in tuned().items()
        if not torch.equal(value, before[name])
    }
    assert changed == {f"self_attn.{of}_proj" for of in "qkvo"}
    assert_the_same_after_a_resume(program, *edits)


def test_where_conversion_stands_decides_what_runs_in_fp8(here):
    """Seven frozen linears a layer, of which four have adapters; the first three need no gradient of their input."""
    convert = next(line for line in ADAPTERS.splitlines(keepends=True) if "convert_to_fp8" in line)
    counts = []
    for adapters in (ADAPTERS, ADAPTERS.replace(convert, "") + convert):
        head, _, _, _, _ = re.split(r"^(?=# \d\. )", PROGRAM, flags=re.M)
        model = run(head + adapters)["model"]
        model.train()(tokens(), labels=tokens()).loss.backward()
        counts.append((len(model.fp8_report.converted), fp8_step(model).fp8_gemms))
    frozen = 14 + 14 - 3
    assert counts == [(14, frozen), (14 + 16, frozen + 3 * 16 - 3)]


# ------------------------------------------------------------------------------------------------------------- the table


def table() -> dict[str, list[str]]:
    """Family -> the other cells of its row."""
    rows = [
        line.strip("|\n ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")
    ]
    return {family: cells for family, *cells in rows if family != "family"}


def named(cell: str) -> set[str]:
    """Its names, with alternatives in braces written out."""
    found = set()
    for name in re.findall("`([^`]+)`", cell):
        parts = [part.split(",") for part in re.split(r"\{(.+?)\}", name)]
        found |= {"".join(chosen) for chosen in product(*parts)}
    return found


def in_a_layer(name: str) -> str:
    return re.sub(
        r"^model\.layers\.\d+\.|(?<=experts\.)\d+", lambda found: "N" if found[0].isdigit() else "", name
    )


def test_the_table_has_the_six_families():
    assert list(table()) == list(FAMILIES)


@pytest.mark.parametrize("family", some(FAMILIES, "Gemma 3", "Mixtral", "DeepSeek-V3", "GPT-OSS"))
def test_a_family_runs_in_fp8_what_the_table_says(family, tmp_path):
    from transformers import AutoModelForCausalLM

    in_fp8, besides, exported = table()[family]
    model, ids = build(family), tokens()
    plain = model(ids).logits.detach().float()
    report = convert_to_fp8(model, "rowwise").fp8_report
    assert {in_a_layer(name) for name in report.converted} == named(in_fp8)
    everywhere = [row.name for row in report.rows if not row.converted and row.kind.endswith("RMSNorm")]
    everywhere += ["model.embed_tokens", "lm_head"]
    assert {in_a_layer(name) for name in report.skipped.keys() - {*everywhere}} == named(besides)

    assert (model(ids).logits - plain).float().norm() < 0.2 * plain.norm()
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-3), []
    for _ in range(2):
        loss = model(ids, labels=ids).loss
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        counts = fp8_step(model)
        assert counts.fp8_gemms > 0 and counts.hp_gemms == 0 and not counts.nonfinite
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] < losses[0] and not model.fp8_report.not_in_use

    model.save_pretrained(tmp_path / "tuned")
    done = command("import", tmp_path / "tuned", tmp_path / "run")
    assert (done == 0) == (exported == "yes"), f"{family}: import ends with {done}"
    if done == 0:
        like = f"--like={tmp_path / 'tuned'}"
        assert command("export", tmp_path / "run", tmp_path / "fp8", like, "--format=fp8-channel") == 0
        with torch.no_grad():
            wanted, got = (
                AutoModelForCausalLM.from_pretrained(tmp_path / of)(ids).logits.float()
                for of in ("tuned", "fp8")
            )
        assert 0 < (got - wanted).norm() < 0.15 * wanted.norm()


def test_gemma_3_with_images_has_a_tower_that_skip_leaves():
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "image_size": 32, "patch_size": 16}
    config = AutoConfig.for_model("gemma3", text_config=COMMON, vision_config=vision, mm_tokens_per_image=4)
    found = []
    for skip in (DEFAULT_SKIP, [*DEFAULT_SKIP, "vision_tower"]):
        report = convert_to_fp8(AutoModelForCausalLM.from_config(config), skip=skip).fp8_report
        assert len([name for name in report.converted if ".language_model." in name]) == 14
        found.append(len([name for name in report.converted if ".vision_tower." in name]))
    assert found == [8, 0] and 'skip=[*DEFAULT_SKIP, "vision_tower"]' in PAGE.read_text()


def test_published_forms_are_converted_if_they_are_loaded_as_the_page_says(tmp_path):
    """DeepSeek-V3's FP8 of 128x128 blocks, and GPT-OSS' MXFP4."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config
    from transformers.integrations.finegrained_fp8 import FP8Linear

    build("DeepSeek-V3").save_pretrained(tmp_path / "bf16")
    assert command("import", tmp_path / "bf16", tmp_path / "run") == 0
    # no whole blocks, here as in the published one
    ignored = ("--ignore=*.kv_a_proj_with_mqa", "--ignore=*.q_a_proj")
    assert command("export", tmp_path / "run", tmp_path / "DeepSeek-V3", "--format=fp8-block", *ignored) == 0

    build("GPT-OSS").save_pretrained(tmp_path / "GPT-OSS")
    path = tmp_path / "GPT-OSS" / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, rows, cols = tensors.pop(name).shape
        draw = torch.Generator().manual_seed(2)
        codes = torch.randint(256, (experts, cols, rows // 32, 16), dtype=torch.uint8, generator=draw)
        tensors |= {
            f"{name}_blocks": codes,
            f"{name}_scales": torch.full(codes.shape[:-1], 121, dtype=torch.uint8),
        }
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((path.parent / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (path.parent / "config.json").write_text(json.dumps(config))

    for family, of in {"DeepSeek-V3": FineGrainedFP8Config, "GPT-OSS": Mxfp4Config}.items():
        assert f"{of.__name__}(dequantize=True)" in PAGE.read_text()
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / family, quantization_config=of(dequantize=True), dtype=torch.bfloat16
        )
        report = convert_to_fp8(model, "rowwise").fp8_report
        assert {in_a_layer(name) for name in report.converted} == named(table()[family][0])
        model(tokens(), labels=tokens()).loss.backward()
        assert fp8_step(model).hp_gemms == 0

    quantized = FP8Linear(64, 64, block_size=(128, 128))  # what stands there without `dequantize`
    both: Any = convert_to_fp8(torch.nn.Sequential(torch.nn.Linear(64, 64), quantized))
    assert both.fp8_report.skipped["1"].startswith("FP8Linear is a subclass of nn.Linear")
