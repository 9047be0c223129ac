"""The models among the files of a repository, and the default."""

from __future__ import annotations

import pytest

from luce.errors import UsageError
from luce.hub.variants import DeviceMemory, Variant, by_preference, default, select, variants

GB = 10**9


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("Qwen3-4B-Q4_K_M.gguf", "Q4_K_M"),
        ("model.q8_0.gguf", "Q8_0"),
        ("gemma-2b-it-IQ4_XS.gguf", "IQ4_XS"),
        ("Some-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("gpt-20b-mxfp4.gguf", "MXFP4"),
        ("x-MXFP4_MOE.gguf", "MXFP4_MOE"),
        ("x-BF16.gguf", "BF16"),
        ("x.f16.gguf", "F16"),
        ("x-IQ2_XXS.gguf", "IQ2_XXS"),
        ("x-TQ1_0.gguf", "TQ1_0"),
        ("Q4_K_M.gguf", "Q4_K_M"),
        ("x.i1-Q4_K_M.gguf", "Q4_K_M"),
        ("Q6_K/model.gguf", "Q6_K"),
        ("model.gguf", ""),
        ("model-7B.gguf", ""),
        ("Q4-talk.gguf", ""),
    ],
)
def test_quants_of_names(file: str, quant: str) -> None:
    assert variants({file: 5}) == [Variant(quant, (file,), 5)]


def test_parts_belong_together() -> None:
    files = {f"UD-Q2_K_XL/x-UD-Q2_K_XL-0000{n}-of-00003.gguf": n for n in (2, 3, 1)}
    (model,) = variants(files)
    assert model == Variant("UD-Q2_K_XL", tuple(sorted(files)), 6)
    del files["UD-Q2_K_XL/x-UD-Q2_K_XL-00002-of-00003.gguf"]
    assert variants(files) == []


def test_what_is_no_model_of_its_own() -> None:
    names = (
        "mmproj-x-F16.gguf",
        "sub/mmproj-BF16.gguf",
        "imatrix_x.gguf",
        "x.imatrix.gguf",
        "README.md",
        "x.safetensors",
    )
    assert variants(dict.fromkeys(names, 1)) == []


def models(**sizes: float) -> list[Variant]:
    return [Variant(quant, (f"x-{quant}.gguf",), int(size * GB)) for quant, size in sizes.items()]


ALL = models(BF16=16, Q8_0=8.5, Q6_K=6.6, Q4_K_M=4.9, Q4_K_S=4.7, Q3_K_M=3.8, Q2_K=3.0)


@pytest.mark.parametrize(
    ("memory", "quant", "why"),
    [
        (24, "Q4_K_M", "fits cuda:0 with 24.0 GB"),
        (6, "Q4_K_M", "fits cuda:0 with 6.0 GB"),
        (5.8, "Q4_K_S", "fits cuda:0 with 5.8 GB; Q4_K_M with 4.9 GB does not"),
        (5, "Q3_K_M", "fits cuda:0 with 5.0 GB; Q4_K_M with 4.9 GB does not"),
        (4.2, "Q2_K", "fits cuda:0 with 4.2 GB; Q4_K_M with 4.9 GB does not"),
    ],
)
def test_the_default_is_what_fits(memory: float, quant: str, why: str) -> None:
    model, reason = default("a/b", ALL, DeviceMemory(int(memory * GB), "cuda:0"))
    assert (model.quant, reason) == (quant, why)


def test_room_beside_the_weights() -> None:
    # A GiB, and on large devices a tenth: keys, values and activations need memory too.
    assert DeviceMemory(6 * GB, "cuda:0").fits(6 * GB - (1 << 30))
    assert not DeviceMemory(6 * GB, "cuda:0").fits(6 * GB - (1 << 30) + 1)
    assert DeviceMemory(100 * GB, "cuda:0").fits(90 * GB) and not DeviceMemory(100 * GB, "cuda:0").fits(90 * GB + 1)


def test_nothing_fits() -> None:
    with pytest.raises(
        UsageError,
        match=r"^model 'a/b': the smallest file, Q2_K, has 3.0 GB and does not fit cuda:0 with 2.0 GB; name one to "
        r"take it all the same: Q2_K \(3.0 GB\), Q3_K_M \(3.8 GB\), ",
    ):
        default("a/b", ALL, DeviceMemory(2 * GB, "cuda:0"))


@pytest.mark.parametrize(
    ("sizes", "order"),
    [
        ({"Q8_0": 8, "BF16": 16, "Q5_K_M": 5.5}, ["Q5_K_M", "Q8_0", "BF16"]),
        ({"Q2_K": 3, "Q3_K_L": 4, "IQ1_S": 1}, ["Q3_K_L", "Q2_K", "IQ1_S"]),
        ({"IQ4_XS": 4.4, "UD-Q4_K_XL": 5, "Q4_1": 5}, ["UD-Q4_K_XL", "IQ4_XS", "Q4_1"]),
        ({"F16": 16, "MXFP4": 4, "Q4_0_4_4": 4.5}, ["MXFP4", "Q4_0_4_4", "F16"]),
    ],
)
def test_preference(sizes: dict[str, float], order: list[str]) -> None:
    assert [model.quant for model in by_preference(models(**sizes))] == order


def test_without_known_memory_the_usual_one() -> None:
    assert default("a/b", ALL, None)[0].quant == "Q4_K_M"


def test_selection() -> None:
    some = [*ALL, *models(**{"UD-Q6_K_XL": 7})]
    assert select("a/b", some, "q8_0").quant == "Q8_0"
    assert select("a/b", some, "q6_k_xl").quant == "UD-Q6_K_XL"
    assert select("a/b", some, "x-BF16.gguf").quant == "BF16"
    with pytest.raises(UsageError, match=r"^model 'a/b': the repository has no Q5_K_M; it has Q2_K \(3.0 GB\), "):
        select("a/b", some, "Q5_K_M")


def test_a_quant_of_two_files() -> None:
    two = [Variant("Q8_0", ("a-Q8_0.gguf",), 1), Variant("Q8_0", ("b-Q8_0.gguf",), 2)]
    with pytest.raises(
        UsageError, match=r"Q8_0 is the quant of a-Q8_0.gguf, b-Q8_0.gguf; name the file behind the colon"
    ):
        select("a/b", two, "Q8_0")
    assert select("a/b", two, "b-Q8_0.gguf") is two[1]
