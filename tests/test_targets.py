"""The records of chips and models, and which chip a device name belongs to."""

from __future__ import annotations

import pytest

from dlinfer_ext.targets import load_model, load_soc, model_names, soc_names, soc_of_device

KIB = 1024
# cube cores, vector cores, UB, L1, L0A, L0B, L0C, Triton, registered operators
RECORDS = {
    "310p": ("Ascend310P3", 8, 8, 256, 1024, 64, 64, 256, False, False),
    "a2": ("Ascend910B3", 20, 40, 192, 512, 64, 64, 128, True, True),
    "a3": ("Ascend910_9382", 24, 48, 192, 512, 64, 64, 128, True, True),
    "a5": ("Ascend950PR_9589", 32, 64, 248, 512, 64, 64, 256, True, False),
}


def test_every_chip_has_its_numbers() -> None:
    assert set(soc_names()) == set(RECORDS)
    for name, (arch, cube, vector, ub, l1, l0a, l0b, l0c, triton, fused) in RECORDS.items():
        soc = load_soc(name)
        assert (soc.name, soc.arch, soc.cube_cores, soc.vector_cores) == (name, arch, cube, vector)
        sizes = (soc.ub_bytes, soc.l1_bytes, soc.l0a_bytes, soc.l0b_bytes, soc.l0c_bytes)
        assert sizes == tuple(n * KIB for n in (ub, l1, l0a, l0b, l0c))
        assert (soc.triton, soc.fused) == (triton, fused)
        assert soc.vector_cores % soc.cube_cores == 0


@pytest.mark.parametrize(
    ("device", "chip"),
    [
        ("Ascend910B4-1", "a2"), ("Ascend910B3", "a2"), ("Ascend910B", "a2"), ("Ascend910_9382", "a3"),
        ("Ascend910_9362", "a3"), ("Ascend950DT_9581", "a5"), ("Ascend950PR_9589", "a5"), ("Ascend910_9589", "a5"),
        ("Ascend310P3", "310p"),
    ],
)  # fmt: skip
def test_a_device_belongs_to_a_chip(device: str, chip: str) -> None:
    assert soc_of_device(device) == chip


@pytest.mark.parametrize("device", ["Ascend910A", "Ascend910", "ascend910B3", "Ascend310", "", "NVIDIA H100"])
def test_an_unknown_device_is_an_error_that_helps(device: str) -> None:
    with pytest.raises(ValueError, match=r"is not known: .*Ascend910B.*; add a record to configs/soc"):
        soc_of_device(device)


def test_an_unknown_record_is_an_error_that_lists_them() -> None:
    with pytest.raises(ValueError, match="chip 'a4' is not known: take one of 310p, a2, a3, a5"):
        load_soc("a4")
    with pytest.raises(ValueError, match=r"model 'gpt' is not known: take one of .*qwen3_5-9b"):
        load_model("gpt")


def test_an_archs_own_name_leads_back_to_it() -> None:
    for name in soc_names():
        assert soc_of_device(load_soc(name).arch) == name


@pytest.mark.parametrize("name", model_names())
def test_a_model_is_whole_and_splits(name: str) -> None:
    model = load_model(name)
    assert model.rule in ("gdn", "kda")
    assert model.norm_gate in ("silu", "sigmoid")
    assert model.value_heads % model.heads == 0
    assert model.channels(1) == 2 * model.channels(2)
    assert min(model.key_dim, model.value_dim, model.conv_width, model.hidden, model.vocab, model.drafts) > 0


def test_the_channels_of_qwen3_5_9b() -> None:
    """Q and k of 16 heads of 128, v of 32."""
    model = load_model("qwen3_5-9b")
    assert model.channels(1) == 8192
    assert model.channels(2) == 4096
