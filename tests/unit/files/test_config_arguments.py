"""Shipped configs by name."""

from megatron_fp8.files.config_arguments import example_configs, find_config, which_config


def test_a_name_is_a_shipped_config_and_a_file_is_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = example_configs()["tiny_gpt_cpu"]
    assert shipped.is_file()
    assert find_config("tiny_gpt_cpu") == find_config("tiny_gpt_cpu.yaml") == str(shipped)
    (tmp_path / "tiny_gpt_cpu").write_text("model: {}\n")
    assert find_config("tiny_gpt_cpu") == "tiny_gpt_cpu"
    for other in ("no_such", "folder/tiny_gpt_cpu", "", "x" * 9999, "a\0b"):
        assert find_config(other) == other


def test_a_name_that_is_none_is_answered_by_the_nearest():
    for given in ("tiny_gpt", "tiny_gtp_cpu", "configs/tiny_gpt.yaml", "Tiny_GPT_CPU"):
        assert which_config(given).startswith("Did you mean tiny_gpt_cpu? Shipped ones, by name: "), given
    assert which_config("llama3").startswith("Did you mean llama3_70b or llama3_8b?")
    assert which_config("zzz").startswith("Shipped ones") and which_config("").startswith("Shipped ones")
