"""The precision map: sites that are alike share a row, which names all of them and no other."""

from megatron_fp8.report.page import precision_map, sentence


def site(name, **fields):
    return {
        "name": name,
        "precision": "fp8",
        "recipe": "mxfp8",
        "backend": "emulated",
        "reason": "asked",
        **fields,
    }


def test_alike_sites_share_a_row_with_ranges():
    sites = [site(f"layers.{layer}.fc1") for layer in range(6)] + [site("layers.3.fc2"), site("output")]
    sites[2] = site("layers.2.fc1", reason="fp8_overrides")
    rows = precision_map(sites)
    assert [(row.name, row.sites, row.reason) for row in rows] == [
        ("layers.0–1,3–5.fc1", 5, "asked"), ("layers.2.fc1", 1, "fp8_overrides"), ("layers.3.fc2", 1, "asked"),
        ("output", 1, "asked"),
    ]  # fmt: skip


def test_experts_are_two_ranges_where_these_name_all_and_a_list_where_not():
    names = [f"layers.{layer}.experts.{e}.fc1" for layer in range(3) for e in range(4)]
    (row,) = precision_map([site(name) for name in names])
    assert row.name == "layers.0–2.experts.0–3.fc1" and row.sites == 12 and row.listed == ()
    (row,) = precision_map([site(name) for name in names[:-1]])
    assert row.name == "layers.*.experts.*.fc1" and row.listed == tuple(names[:-1])


def test_gemms_operands_and_notes_are_told():
    gemms = {"fprop": "fp8", "dgrad": "fp8", "wgrad": "bf16"}
    (row,) = precision_map(
        [site("a", gemms=gemms, roles={"input": "e4m3", "weight": None}, notes=["cast twice"])]
    )
    assert (row.gemms, row.roles, row.notes) == (("fp8", "fp8", "bf16"), ("input: e4m3",), ("cast twice",))
    assert sentence(site("a")) == "FP8 mxfp8 on emulated: asked"
    (row,) = precision_map([{"name": "bare"}])
    assert (row.precision, row.gemms) == ("", ("", "", ""))
