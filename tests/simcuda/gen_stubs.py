"""Writes the rest of each library: a stub for every function that torch imports and nobody here has written.

    gen_stubs.py TORCH_LIB_FOLDER OUTPUT_FOLDER LIBRARY=OBJECT[,OBJECT...] ...

For each library it leaves `<name>.stubs.c`, whose functions return 0 (success) and log their names, and
`<name>.map`, the version script: NVIDIA's libraries put all symbols under one version, their SONAME.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# SONAME: (what its functions' names look like, version node or None)
LIBRARIES = {
    "libcudart.so.13": (r"(__)?cuda[A-Z]", "libcudart.so.13"),
    "libcublas.so.13": (r"cublas(?!Lt)", "libcublas.so.13"),
    "libcublasLt.so.13": (r"cublasLt", "libcublasLt.so.13"),
    "libcudnn.so.9": (r"cudnn", "libcudnn.so.9"),
    "libcufft.so.12": (r"cufft", "libcufft.so.12"),
    "libcurand.so.10": (r"curand", None),
    "libcusparse.so.12": (r"cusparse(?!Lt)", "libcusparse.so.12"),
    "libcusparseLt.so.0": (r"cusparseLt", None),
    "libcusolver.so.12": (r"cusolver", "libcusolver.so.12"),
    "libnccl.so.2": (r"p?nccl", None),
    "libnvshmem_host.so.3": (r"nvshmem", "NVSHMEM"),
    "libnvrtc.so.13": (r"nvrtc", "libnvrtc.so.13"),
    "libcupti.so.13": (r"cupti", "libcupti.so.13"),
    "libcufile.so.0": (r"cuFile", None),
    "libcuda.so.1": (r"cu(?!File)[A-Z]", None),
    "libnvidia-ml.so.1": (r"nvml", None),
}
# What torch and triton ask the driver for by name at run time, so that no library of theirs imports it.
ASKED_BY_NAME = """
    cuCtxFromGreenCtx cuDevResourceGenerateDesc cuDevSmResourceSplitByCount cuDeviceGetDevResource cuFuncSetCacheConfig
    cuGreenCtxCreate cuGreenCtxDestroy cuGreenCtxStreamCreate cuLinkAddData_v2 cuLinkComplete cuLinkCreate_v2
    cuLinkDestroy cuMemExportToShareableHandle cuMemGetAllocationPropertiesFromHandle cuMemImportFromShareableHandle
    cuMemRetainAllocationHandle cuMulticastAddDevice cuMulticastBindMem cuMulticastCreate cuMulticastUnbind
    cuStreamWriteValue32 cuTensorMapEncodeIm2col cuTensorMapEncodeTiled
"""


def symbols(path: Path, undefined: bool) -> set[str]:
    text = subprocess.run(
        ["readelf", "-Ws", "--dyn-syms", str(path)], capture_output=True, text=True, check=True
    ).stdout
    rows = (line.split() for line in text.splitlines())
    return {row[7].split("@")[0] for row in rows if len(row) >= 8 and (row[6] == "UND") == undefined}


def written(objects: list[str]) -> set[str]:
    found: set[str] = set()
    for each in objects:
        text = subprocess.run(["nm", "--defined-only", "-g", each], capture_output=True, text=True, check=True).stdout
        found |= {line.split()[-1] for line in text.splitlines() if line.strip()}
    return found


def main() -> None:
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    objects = {name: files.split(",") if files else [] for name, files in (a.split("=") for a in sys.argv[3:])}
    libraries = sorted(folder.glob("*.so"))
    wanted = set().union(*(symbols(path, True) for path in libraries))
    wanted -= set().union(*(symbols(path, False) for path in libraries))
    for soname, (pattern, version) in LIBRARIES.items():
        names = {name for name in wanted if re.match(pattern, name)} | set(
            ASKED_BY_NAME.split() if soname == "libcuda.so.1" else ()
        )
        missing = sorted(names - written(objects.get(soname, [])))
        lines = ["int sim_unknown(const char* name);"]
        lines += [
            f'__attribute__((visibility("default"))) int {name}() {{ return sim_unknown("{name}"); }}'
            for name in missing
        ]
        (output / f"{soname}.stubs.c").write_text("\n".join(lines) + "\n")
        node = f"{version} {{ global: *; }};\n" if version else ""
        (output / f"{soname}.map").write_text(node)


if __name__ == "__main__":
    main()
