"""The peak table against the collected sheet peaks.csv, row by row; every difference is listed with its reason."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from flopmeter.devices import find_device

SHEET = Path(__file__).resolve().parents[2] / "shared" / "data" / "peaks.csv"
GEFORCE = ("3060", "3060 Ti", "3070", "3070 Ti", "3080", "3080 Ti", "3090", "3090 Ti", "4060", "4060 Ti", "4070")
GEFORCE += ("4070 SUPER", "4070 Ti", "4070 Ti SUPER", "4080", "4080 SUPER", "4090", "5070", "5070 Ti", "5080", "5090")
TURING = ("2070 Super", "2080", "2080 Super", "2080 Ti")
SHEET_TO_NAME = {  # (name, variant) in the sheet -> a name in the table, and devices per row
    **{(f"RTX {name}", ""): (f"NVIDIA GeForce RTX {name}", 1) for name in GEFORCE},
    **{(f"RTX {name}", "Founders boost"): (f"NVIDIA GeForce RTX {name}", 1) for name in TURING},
    **{(name, "PCIe"): (f"NVIDIA {name}", 1) for name in ("A10", "A30", "A40", "L4", "L40", "L40S", "L20")},
    **{(f"RTX {name}", "Ampere"): (f"NVIDIA RTX {name}", 1) for name in ("A4000", "A5000", "A6000")},
    **{(name, "per chip"): (name, 1) for name in ("TPU v4", "TPU v5e", "TPU v5p")},
    ("P100", "SXM2 16GB"): ("Tesla P100-SXM2-16GB", 1),
    ("P100", "PCIe 16GB"): ("Tesla P100-PCIE-16GB", 1),
    ("V100", "SXM2"): ("Tesla V100-SXM2-32GB", 1),
    ("V100", "PCIe"): ("Tesla V100-PCIE-32GB", 1),
    ("V100S", "PCIe"): ("Tesla V100S-PCIE-32GB", 1),
    ("T4", "PCIe"): ("Tesla T4", 1),
    ("Titan RTX", ""): ("NVIDIA TITAN RTX", 1),
    ("A10G", "AWS g5"): ("NVIDIA A10G", 1),
    ("A100", "SXM4 40/80GB"): ("NVIDIA A100-SXM4-80GB", 1),
    ("A100", "PCIe 40/80GB"): ("NVIDIA A100 80GB PCIe", 1),
    ("A800", "SXM4/PCIe"): ("NVIDIA A800-SXM4-80GB", 1),
    ("RTX 6000 Ada", ""): ("NVIDIA RTX 6000 Ada Generation", 1),
    ("RTX PRO 6000 Blackwell", "Workstation/Server 600W"): ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 1),
    ("H100", "SXM5 80GB HBM3"): ("NVIDIA H100 80GB HBM3", 1),
    ("H100", "PCIe"): ("NVIDIA H100 PCIe", 1),
    ("H100", "NVL 94GB"): ("NVIDIA H100 NVL", 1),
    ("H800", "SXM5"): ("NVIDIA H800", 1),
    ("H800", "PCIe"): ("NVIDIA H800 PCIe", 1),
    ("H20", "SXM5 96GB"): ("NVIDIA H20", 1),
    ("H200", "SXM 141GB"): ("NVIDIA H200", 1),
    ("H200", "NVL 141GB"): ("NVIDIA H200 NVL", 1),
    ("GH200", "96GB HBM3 / 144GB HBM3e"): ("NVIDIA GH200 480GB", 1),
    ("B200", "SXM (HGX/DGX, 1000W)"): ("NVIDIA B200", 1),
    ("B300", "SXM"): ("NVIDIA B300 SXM6 AC", 1),
    ("GB200", "NVL72, per GPU (1200W)"): ("NVIDIA GB200", 1),
    ("GB300", "NVL72, per GPU"): ("NVIDIA GB300", 1),
    ("MI100", "PCIe"): ("AMD Instinct MI100", 1),
    ("MI210", "PCIe"): ("AMD Instinct MI210", 1),
    ("MI250", "OAM (2 GCDs)"): ("AMD Instinct MI250", 2),
    ("MI250", "one GCD (as torch sees it)"): ("AMD Instinct MI250", 1),
    ("MI250X", "OAM (2 GCDs)"): ("AMD Instinct MI250X", 2),
    ("MI250X", "one GCD (as torch sees it)"): ("AMD Instinct MI250X/MI250", 1),
    ("MI300X", "OAM"): ("AMD Instinct MI300X", 1),
    ("MI300A", "APU"): ("AMD Instinct MI300A", 1),
    ("MI325X", "OAM"): ("AMD Instinct MI325 OAM", 1),
    ("MI350X", "OAM 1000W, 2.2 GHz"): ("AMD Instinct MI350 OAM", 1),
    ("MI355X", "OAM 1400W, 2.4 GHz"): ("AMD Instinct MI355 OAM", 1),
    ("RX 7900 XTX", ""): ("AMD Radeon RX 7900 XTX", 1),
    ("Data Center GPU Max 1550", "one stack = one torch.xpu device"): ("Intel(R) Data Center GPU Max 1550", 1),
    ("Gaudi2", "OAM"): ("GAUDI2", 1),
    ("Gaudi3", "OAM 900W"): ("GAUDI3", 1),
    ("TPU v3", "per chip (2 cores)"): ("TPU v3", 2),
    ("TPU v6e (Trillium)", "per chip"): ("TPU v6 lite", 1),
    ("TPU v7x (Ironwood)", "per chip (2 TensorCores)"): ("TPU7x", 2),
}
LEFT_OUT = {  # sheet rows that we will not state as a peak: sources disagree, or no driver prints a name that tells
    "B100": "no vendor sheet, 989 to 1800",
    "GB10": "100 or 125",
    "RTX PRO 5000 Blackwell": "147.4 or 294.8",
    "Jetson AGX Orin": "all Orin modules print one name",
    "Jetson AGX Thor": "all Thor modules print one name",
    "TPU v2": "no device name was collected",
    **{f"Trainium{n}": "no device name was collected" for n in (1, 2, 3)},
    **{f"Ascend {n}": "low confidence, no vendor sheet" for n in ("910A", "910B", "910C", "950DT")},
    **{f"M{n}{kind}": "one name, several core counts" for n in (1, 2, 3, 4) for kind in ("", " Pro", " Max", " Ultra")},
}
LEFT_OUT_VARIANTS = {("H100", "SXM5 96GB HBM2e (Grand Teton, 500W)"): "its peak lies between 835 and 989"}
ROW_EXCEPTIONS = {
    ("H200", "NVL 141GB", "fp64"): "the CUDA-core rate, which is not a matmul's",
    ("MI250", "OAM (2 GCDs)", "fp32"): "the vector rate; the matrix rate is the fp64_matrix row's",
    ("MI250X", "OAM (2 GCDs)", "fp32"): "the vector rate; the matrix rate is the fp64_matrix row's",
    ("MI250", "OAM (2 GCDs)", "mem_bw_TBps"): "the row per GCD, 1.6, is used",
}
MATMUL_RATE = {"fp64_tensor": "fp64", "fp64_matrix": "fp64", "fp32_matrix": "fp32"}
NO_COLUMN = {"int4", "fp6", "mxfp8", "fp16_fp16acc", "fp8_fp16acc"}


def sheet() -> list[dict[str, str]]:
    if not SHEET.exists():
        pytest.skip("the collected sheet peaks.csv is not on this machine")
    with SHEET.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_device_of_the_sheet_is_in_the_table_or_left_out_for_a_reason() -> None:
    for row in sheet():
        key = (row["name"], row["variant"])
        assert (key in SHEET_TO_NAME) + (row["name"] in LEFT_OUT) + (key in LEFT_OUT_VARIANTS) == 1, key


def test_every_row_of_the_sheet_that_maps_to_a_block_agrees_with_it() -> None:
    rows = [row for row in sheet() if (row["name"], row["variant"]) in SHEET_TO_NAME and row["dense_tflops"]]
    matmul_rows = {(row["name"], row["variant"], MATMUL_RATE.get(row["dtype"])) for row in rows}
    num_checked = 0
    for row in rows:
        key, dtype = (row["name"], row["variant"]), row["dtype"]
        if dtype in NO_COLUMN or (*key, dtype) in ROW_EXCEPTIONS or (*key, dtype) in matmul_rows:
            continue  # in matmul_rows: the vector rate, beside a row for the matrix units
        name, num_devices = SHEET_TO_NAME[key]
        values = [float(text) for text in re.findall(r"[\d.]+(?= |$)", row["dense_tflops"])]
        device = find_device(name)
        stated = (
            device.memory_bytes_per_s
            if dtype == "mem_bw_TBps"
            else device.peak_flop_per_s[MATMUL_RATE.get(dtype, dtype)]
        )
        assert any(stated == pytest.approx(value * 1e12 / num_devices, rel=1e-9) for value in values), (name, dtype)
        num_checked += 1
    assert num_checked > 300
