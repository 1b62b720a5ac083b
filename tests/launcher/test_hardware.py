"""Peaks by the names that torch reports; no name, no number."""

import pytest

from launcher.hardware import Hardware, known_peak, peak_flops


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA A100-PCIE-40GB", 312e12, 19.5e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H100 NVL", 835e12, 60e12),
        ("NVIDIA H200", 989.4e12, 67e12),
        ("NVIDIA H200 NVL", 835e12, 60e12),
        ("NVIDIA B200", 2.25e15, None),
        ("NVIDIA GB200", 2.5e15, None),
        ("NVIDIA L40S", 362.05e12, 91.6e12),
        ("AMD Instinct MI300X", 1307.4e12, 163.4e12),
        ("NVIDIA A1000", None, None),
        ("NVIDIA L40", None, None),
        ("NVIDIA H200 MIG 1g.18gb", None, None),
        ("cpu", None, None),
        ("", None, None),
    ],
)
def test_peak_of_a_device(name: str, bf16: float | None, fp32: float | None) -> None:
    assert (known_peak(name, "bf16"), known_peak(name, "fp32")) == (bf16, fp32)


def test_the_setting_comes_first() -> None:
    assert peak_flops(Hardware(), "NVIDIA H200", "bf16") == 989.4e12
    assert peak_flops(Hardware(peak_flops=1e12), "NVIDIA H200", "bf16") == 1e12
    assert peak_flops(Hardware(), "cpu", "bf16") is None


@pytest.mark.parametrize("fields", [{"threads": 0}, {"peak_flops": 0.0}, {"peak_flops": -1.0}])
def test_impossible_hardware_is_refused_by_name(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=rf"hardware.{next(iter(fields))} \("):
        Hardware(**fields)  # type: ignore[arg-type]
