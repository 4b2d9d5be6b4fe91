#!/usr/bin/env bash
# Builds the stand-ins for NVIDIA's libraries: build.sh PYTHON OUTPUT, both relative to the current folder.
# PYTHON is the interpreter whose torch (a CUDA build without its nvidia-* packages) they are for.
set -euo pipefail
PYTHON=$PWD/$1
OUT=$PWD/$2
cd "$(dirname "$0")"
WORK=$OUT/.build
TORCH=$("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')/lib
mkdir -p "$OUT" "$WORK"

compile() { # SOURCE OBJECT [FLAGS]: only when the source or a header is newer than the object
  local source=$1 object=$WORK/$2
  shift 2
  if [ ! -f "$object" ] || [ -n "$(find "$source" ./*.h -newer "$object")" ]; then
    g++ -std=c++17 -O1 -fPIC -fvisibility=hidden -Wall -Wextra "$@" -c "$source" -o "$object"
  fi
}
for each in core cudart cublas driver nvml cupti nccl cudnn; do
  compile $each.cpp $each.o
done
compile cublas.cpp cublasLt.o -DSIM_LT
g++ -shared -Wl,-soname,libsimcuda.so -o "$OUT/libsimcuda.so" "$WORK/core.o" -lpthread -ldl

# Which object is written for which library; without one, all of its functions are generated and do nothing.
declare -A OBJECTS=(
  [libcudart.so.13]=cudart.o [libcublas.so.13]=cublas.o [libcublasLt.so.13]=cublasLt.o [libcuda.so.1]=driver.o
  [libnvidia-ml.so.1]=nvml.o [libcupti.so.13]=cupti.o [libnccl.so.2]=nccl.o [libcudnn.so.9]=cudnn.o
  [libcufft.so.12]= [libcurand.so.10]= [libcusparse.so.12]= [libcusparseLt.so.0]= [libcusolver.so.12]=
  [libnvshmem_host.so.3]= [libnvrtc.so.13]= [libcufile.so.0]=
)
arguments=()
for name in "${!OBJECTS[@]}"; do
  arguments+=("$name=${OBJECTS[$name]:+$WORK/${OBJECTS[$name]}}")
done
"$PYTHON" gen_stubs.py "$TORCH" "$WORK" "${arguments[@]}"

for name in "${!OBJECTS[@]}"; do
  gcc -fPIC -fvisibility=hidden -w -c "$WORK/$name.stubs.c" -o "$WORK/$name.stubs.o"
  script=()
  [ -s "$WORK/$name.map" ] && script=(-Wl,--version-script="$WORK/$name.map")
  object=()
  [ -n "${OBJECTS[$name]}" ] && object=("$WORK/${OBJECTS[$name]}")
  # Into a new file that then takes the old one's place: a program that runs meanwhile keeps the library it has.
  g++ -shared -Wl,-soname,"$name" -Wl,-rpath,'$ORIGIN' "${script[@]}" -o "$OUT/.$name" "$WORK/$name.stubs.o" \
    "${object[@]}" -L"$OUT" -lsimcuda -ldl -lpthread
  mv "$OUT/.$name" "$OUT/$name"
done
ln -sf libcuda.so.1 "$OUT/libcuda.so"
