"""The name of a kernel says what it does, and each moment of the device counts once."""

import pytest

from autotune.core.micro_profile import KernelClass
from autotune.core.probe_types import KernelTimes
from autotune.probe.kernels import (
    Kernel,
    Work,
    class_of,
    fused_operators,
    kernel_times,
    list_kernels,
    work_of,
)

# Names as the profiler gives them, cut.
NAMES = {
    Work.PRODUCTS: [
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN",
        "nvjet_sm90_hsh_128x256_64x4_1x2_h_bz_coopA_NTN",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "void cutlass::Kernel2<"
        "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_nn_align8>",
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_nn",
        "ampere_sgemm_128x64_tn",
        "void gemmSN_NN_kernel<float, 128, 2, 4, 8, 4, 4, false>",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128,"
        " 16, 4, 4, false>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, false,"
        " false>",
        "void kgemm_4bit_inference_naive<__nv_bfloat16, 128, 16>",
        "triton_tem_fused_mm_0",
    ],
    Work.FP8: [
        "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128_warpgroupsize1x1x1_bias_f16_execute",
        "nvjet_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel<"
        "cutlass::gemm::kernel::GemmUniversal<"
        "cute::tuple<int, int, int>, cutlass::float_e4m3_t>>>",
    ],
    Work.ATTENTION: [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4,"
        " cutlass::bfloat16_t>",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<"
        "Flash_bwd_kernel_traits<64, 128, 128, 8>",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_6_64x128x128_4x1x1_kernel0_0",
    ],
    Work.BYTES: [
        "void at::native::vectorized_elementwise_kernel<8,"
        " at::native::CUDAFunctor_add<c10::BFloat16>, 3>",
        "void at::native::unrolled_elementwise_kernel<"
        "at::native::direct_copy_kernel_cuda,"
        " c10::Float8_e4m3fn>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float,"
        " at::native::MeanOps<float, float>>>",
        "void at::native::(anonymous"
        " namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
        "void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>",
        "triton_poi_fused__scaled_dot_product_flash_attention_mul_mm_3",
        "triton_red_fused_mm_native_layer_norm_backward_sum_5",
        "Memcpy HtoD (Pinned -> Device)",
        "Memset (Device)",
    ],
}


@pytest.mark.parametrize(
    ("work", "name"), [(work, name) for work, names in NAMES.items() for name in names]
)
def test_a_name_tells_what_a_kernel_does(work: Work, name: str) -> None:
    assert work_of(name) is work


CLASSES = {
    KernelClass.PRODUCTS: [*NAMES[Work.PRODUCTS], *NAMES[Work.FP8], "aten::addmm"],
    KernelClass.ATTENTION: [
        *NAMES[Work.ATTENTION],
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ],
    KernelClass.FUSED: [
        "triton_poi_fused__scaled_dot_product_flash_attention_mul_mm_3",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
        "void at::native::vectorized_elementwise_kernel<8,"
        " at::native::CUDAFunctor_add<c10::BFloat16>, 3>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float,"
        " at::native::MeanOps<float, float>>>",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>",
        "_rms_norm_forward_kernel",
        "aten::silu_backward",
        "CompiledFunctionBackward",
    ],
    KernelClass.UNPACKING: ["void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>"],
    KernelClass.OPTIMIZER: [
        "void at::native::(anonymous"
        " namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
        "void kOptimizerStatic8bit2StateBlockwise<__nv_bfloat16, 1, 256, 1>",
        "void kPreconditionOptimizer32bit2State<float, 1, 4096, 8>",
        "aten::_fused_adamw_",
    ],
    KernelClass.COPIES: [
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "void at::native::unrolled_elementwise_kernel<"
        "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_alignedK_contig<unsigned"
        " short, 2, 64, 64>",
        "aten::copy_",
    ],
    KernelClass.COLLECTIVES: [
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ],
    KernelClass.OTHER: [
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long,"
        " unsigned int, 2, 2, -2>",
        "void at_cuda_detail::cub::DeviceScanKernel<int>",
        "aten::embedding",
    ],
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in CLASSES.items() for name in names]
)
def test_a_name_tells_the_class(kind: KernelClass, name: str) -> None:
    assert class_of(name) is kind


@pytest.mark.parametrize(
    ("name", "operators"),
    [
        (
            "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2",
            ("_to_copy", "add", "mean", "mul", "pow", "rsqrt"),
        ),
        (
            "triton_per_fused_native_layer_norm_backward_sum_15",
            ("native_layer_norm_backward", "sum"),
        ),
        ("triton_poi_fused__unsafe_view_silu", ("_unsafe_view", "silu")),
        ("triton_poi_fused_0", ()),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", ()),
    ],
)
def test_a_fused_kernel_names_what_it_fuses(name: str, operators: tuple[str, ...]) -> None:
    assert fused_operators(name) == operators


def kernel(name: str, start_s: float, end_s: float) -> Kernel:
    return Kernel(name=name, start_s=start_s, end_s=end_s)


def test_times_are_divided_by_what_kernels_do_and_a_moment_counts_once() -> None:
    """A copy to the host runs from 4 to 7 beside a product that runs from 3 to 6; nothing runs from
    7 to 9.
    """
    found = kernel_times(
        [
            kernel("Memcpy DtoH (Device -> Pinned)", 4.0, 7.0),
            kernel("nvjet_tst_192x192", 1.0, 2.0),
            kernel("nvjet_qqtst_128x256", 2.0, 2.5),
            kernel("flash_fwd_kernel", 2.5, 2.75),
            kernel("nvjet_tst_192x192", 3.0, 6.0),
            kernel("triton_poi_fused_mul", 9.0, 10.0),
        ],
        12.0,
    )
    assert found == KernelTimes(
        products_s=4.0,
        fp8_s=0.5,
        attention_s=0.25,
        bytes_s=4.0,
        busy_s=6.75,
        micro_s=12.0,
        num_kernels=6,
    )


def test_where_nothing_can_be_seen_nothing_is_known() -> None:
    assert kernel_times([], 1.0) is None


def test_the_log_has_a_line_for_each_name_the_longest_first() -> None:
    lines = list_kernels(
        [kernel("gemm", 0.0, 0.001), kernel("copy", 0.0, 0.004), kernel("gemm", 0.0, 0.002)]
    )
    assert [line.split() for line in lines] == [
        ["4.000", "ms", "1", "bytes", "copy"],
        ["3.000", "ms", "2", "products", "gemm"],
    ]
