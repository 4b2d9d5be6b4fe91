"""Names are those of kernels in real traces of a V100 and of A100s, cut after what tells."""

from __future__ import annotations

import pytest

from flopmeter.devices.kernels import is_communication, is_matmul


@pytest.mark.parametrize(
    "name",
    [
        "ampere_sgemm_128x64_tn",
        "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 2, 2, false, false",
        "void splitKreduce_kernel<float, float, float, float, true, false, false>(cublasSplitKParams<float>",
        "cudnn_infer_volta_scudnn_128x64_relu_small_nn_v1",
        "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>",
        "void wgrad_alg0_engine<float, 128, 6, 8, 3, 3, 5, false, 512>",
        "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>",
        "void fft2d_r2c_32x32<float, false, 5u, true>",
    ],
)
def test_the_libraries_own_names_tell_matrix_work(name: str) -> None:
    assert is_matmul(name)


@pytest.mark.parametrize(
    "name",
    [
        "void fbgemm_gpu::permute_2D_lengths_kernel<int>",  # the library is named after gemm, the kernel is none
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>",
        "ncclKernel_AllReduce_RING_LL_Sum_float",
    ],
)
def test_other_kernels_are_no_matrix_work(name: str) -> None:
    assert not is_matmul(name)


def test_collectives_are_told_by_their_library() -> None:
    assert is_communication("ncclKernel_AllReduce_RING_LL_Sum_float")
    assert not is_communication("ampere_sgemm_128x64_tn")
